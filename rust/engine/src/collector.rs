//! The truth of every request on the client's side: its tokens so far, its text, its end.
//!
//! Knows nothing of steps and blocks. Fed by the engine after each commit; emptied by whoever reads the request's mailbox.

use std::collections::HashMap;
use std::sync::Arc;

use octavo_core::ids::RequestId;
use octavo_text::output::ChoiceText;

use crate::mailbox::Mailbox;
use crate::update::{ChoiceUpdate, Finish, PositionLogprobs, Update};

/// New tokens of one choice, as a commit brought them.
#[derive(Debug, Default)]
pub(crate) struct NewTokens {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprobs: Vec<PositionLogprobs>,
    pub(crate) finish: Option<Finish>,
}

#[derive(Debug)]
struct Choice {
    text: ChoiceText,
    include_stop: bool,
    /// What the next update will carry.
    pending: ChoiceUpdate,
    ended: bool,
}

#[derive(Debug)]
struct Tracked {
    mailbox: Arc<Mailbox>,
    /// News of every step, not of the end alone.
    stream: bool,
    /// The mailbox holds this id already.
    notified: bool,
    num_prompt_tokens: usize,
    /// Number of the first of `choices`.
    first_choice: u32,
    num_cached_tokens: u32,
    num_logprobs: Option<usize>,
    num_prompt_logprobs: usize,
    prompt_logprobs: Option<Vec<Option<PositionLogprobs>>>,
    pooled: Option<Vec<f32>>,
    choices: Vec<Choice>,
    error: Option<String>,
}

impl Tracked {
    fn ended(&self) -> bool {
        self.choices.iter().all(|choice| choice.ended)
    }

    fn choice_mut(&mut self, index: u32) -> Option<&mut Choice> {
        let place = index.checked_sub(self.first_choice)?;
        self.choices.get_mut(place as usize)
    }

    fn prompt_logprobs_complete(&self) -> bool {
        self.prompt_logprobs.as_ref().is_some_and(|positions| {
            positions.len() == self.num_prompt_tokens
                && positions.iter().skip(1).all(Option::is_some)
        })
    }
}

/// What the collector needs to know of a new request.
pub(crate) struct NewRequest {
    pub(crate) id: RequestId,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) stream: bool,
    pub(crate) num_prompt_tokens: usize,
    pub(crate) first_choice: u32,
    pub(crate) num_logprobs: Option<u32>,
    pub(crate) num_prompt_logprobs: Option<u32>,
    /// Text of a stop token or stop string is part of the text.
    pub(crate) include_stop: bool,
    /// One for each choice.
    pub(crate) texts: Vec<ChoiceText>,
}

/// All requests that have not been fetched to their end.
#[derive(Debug, Default)]
pub(crate) struct Collector {
    requests: HashMap<RequestId, Tracked>,
}

impl Collector {
    pub(crate) fn insert(&mut self, request: NewRequest) {
        let choices = (request.first_choice..)
            .zip(request.texts)
            .map(|(index, text)| Choice {
                text,
                include_stop: request.include_stop,
                pending: ChoiceUpdate {
                    index,
                    ..ChoiceUpdate::default()
                },
                ended: false,
            })
            .collect();
        let tracked = Tracked {
            mailbox: request.mailbox,
            stream: request.stream,
            notified: false,
            num_prompt_tokens: request.num_prompt_tokens,
            first_choice: request.first_choice,
            num_cached_tokens: 0,
            num_logprobs: request.num_logprobs.map(|top| top as usize),
            num_prompt_logprobs: request.num_prompt_logprobs.unwrap_or(0) as usize,
            prompt_logprobs: request
                .num_prompt_logprobs
                .map(|_| vec![None; request.num_prompt_tokens]),
            pooled: None,
            choices,
            error: None,
        };
        self.requests.insert(request.id, tracked);
    }

    /// Likeliest tokens wanted beside each output token, if any log-probabilities are.
    pub(crate) fn num_logprobs(&self, id: RequestId) -> Option<usize> {
        self.requests.get(&id)?.num_logprobs
    }

    /// Likeliest tokens wanted beside each prompt token.
    pub(crate) fn num_prompt_logprobs(&self, id: RequestId) -> usize {
        self.requests
            .get(&id)
            .map_or(0, |request| request.num_prompt_logprobs)
    }

    /// What the first choice found; the others find what it computed.
    pub(crate) fn set_num_cached_tokens(&mut self, id: RequestId, choice: u32, found: u32) {
        if let Some(request) = self.requests.get_mut(&id)
            && request.first_choice == choice
        {
            request.num_cached_tokens = found;
        }
    }

    /// Adds a commit's tokens to a choice. Returns true if a stop string ended it here, so that the core must let go of it.
    pub(crate) fn push(&mut self, id: RequestId, index: u32, new: NewTokens) -> bool {
        let Some(request) = self.requests.get_mut(&id) else {
            return false;
        };
        let Some(choice) = request.choice_mut(index).filter(|choice| !choice.ended) else {
            return false;
        };
        let stopped = choice.push(new);
        request.report(id);
        stopped
    }

    /// Scores of the prompt's tokens from `start` on. A position that is computed again after a preemption keeps its first value.
    pub(crate) fn push_prompt_logprobs(
        &mut self,
        id: RequestId,
        start: usize,
        scores: Vec<PositionLogprobs>,
    ) {
        let Some(positions) = self
            .requests
            .get_mut(&id)
            .and_then(|request| request.prompt_logprobs.as_mut())
        else {
            return;
        };
        for (position, score) in positions.iter_mut().skip(start).zip(scores) {
            position.get_or_insert(score);
        }
    }

    /// The prompt of a request as a vector; told with its end.
    pub(crate) fn set_pooled(&mut self, id: RequestId, vector: &[f32]) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.pooled = Some(vector.to_vec());
        }
    }

    /// Says why a choice of a request is about to end with an error.
    pub(crate) fn explain(&mut self, id: RequestId, reason: &str) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.error = Some(reason.to_owned());
        }
    }

    /// Ends every unfinished choice of a request at once.
    pub(crate) fn end(&mut self, id: RequestId, finish: &Finish, error: Option<String>) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        request.error = error;
        for choice in request.choices.iter_mut().filter(|choice| !choice.ended) {
            choice.end(finish.clone());
        }
        request.report(id);
    }

    /// Ends one choice at once, if it has not ended.
    pub(crate) fn end_choice(&mut self, id: RequestId, index: u32, finish: Finish) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        if let Some(choice) = request.choice_mut(index).filter(|choice| !choice.ended) {
            choice.end(finish);
            request.report(id);
        }
    }

    /// Ends every request.
    pub(crate) fn end_all(&mut self, finish: &Finish, error: Option<&str>) {
        let ids: Vec<RequestId> = self.requests.keys().copied().collect();
        for id in ids {
            self.end(id, finish, error.map(str::to_owned));
        }
    }

    /// Takes the news of a request; forgets the request with its last.
    pub(crate) fn take(&mut self, id: RequestId) -> Option<Update> {
        let request = self.requests.get_mut(&id)?;
        request.notified = false;
        let finished = request.ended();
        let mut update = Update {
            id,
            num_cached_tokens: request.num_cached_tokens,
            prompt_logprobs: request
                .prompt_logprobs_complete()
                .then(|| request.prompt_logprobs.take())
                .flatten(),
            pooled: request.pooled.take(),
            finished,
            error: request.error.take(),
            ..Update::default()
        };
        for choice in &mut request.choices {
            if !choice.pending.token_ids.is_empty()
                || !choice.pending.text.is_empty()
                || choice.pending.finish.is_some()
            {
                let empty = ChoiceUpdate {
                    index: choice.pending.index,
                    ..ChoiceUpdate::default()
                };
                update
                    .choices
                    .push(std::mem::replace(&mut choice.pending, empty));
            }
        }
        if finished {
            self.requests.remove(&id);
        }
        Some(update)
    }

    /// Whether a choice of the request has not ended.
    pub(crate) fn is_unfinished(&self, id: RequestId) -> bool {
        self.requests
            .get(&id)
            .is_some_and(|request| !request.ended())
    }

    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }
}

impl Choice {
    /// True if a stop string ended the choice here and the core does not know it yet.
    fn push(&mut self, new: NewTokens) -> bool {
        let before = self.text.num_tokens();
        let hidden = new
            .finish
            .as_ref()
            .is_some_and(|finish| self.hides_last_token(finish));
        let shown = new.tokens.len() - usize::from(hidden && !new.tokens.is_empty());
        let pushed = self.text.push(&new.tokens[..shown]);
        if shown < new.tokens.len() && pushed.stopped.is_none() {
            self.text.push_hidden();
        }
        let kept = self.text.num_tokens() - before;
        self.pending.text.push_str(&pushed.delta);
        self.pending
            .text_offsets
            .extend_from_slice(&self.text.text_offsets()[before..]);
        self.pending
            .token_ids
            .extend_from_slice(&new.tokens[..kept]);
        self.pending
            .logprobs
            .extend(new.logprobs.into_iter().take(kept));
        // The front's earliest match wins over any finish of the engine.
        if let Some(stop) = pushed.stopped {
            self.pending.finish = Some(Finish::StopString(stop));
            self.ended = true;
            return new.finish.is_none();
        }
        if let Some(finish) = new.finish {
            self.end(finish);
        }
        false
    }

    /// The token that ended the choice is text only if the caller wants stops included.
    fn hides_last_token(&self, finish: &Finish) -> bool {
        !self.include_stop && matches!(finish, Finish::EndOfSequence | Finish::StopToken(_))
    }

    fn end(&mut self, finish: Finish) {
        let last = self.text.finish();
        self.pending.text.push_str(&last.delta);
        // What was held back may turn out to hold a stop string.
        self.pending.finish = Some(last.stopped.map_or(finish, Finish::StopString));
        self.ended = true;
    }
}

impl Tracked {
    fn report(&mut self, id: RequestId) {
        if !self.notified && (self.stream || self.ended()) {
            self.notified = true;
            self.mailbox.notify(id);
        }
    }
}
