//! The requests of one body while they run: from events to pieces of text.

use std::sync::Arc;

use octavo_text::Tokenizer;
use octavo_text::output::TextOptions;
use octavo_wire::PositionLogprobs;

use super::choice::{ChoiceReader, Ended, Piece};
use super::reply::Usage;
use crate::engine::{Event, News, Ticket};
use crate::error::ApiError;
use crate::metrics::{Clock, Metrics};
use crate::trace::{self, Trace};

/// What an event means to the client.
#[derive(Debug)]
pub(crate) enum Step {
    /// The prompt of this number is computed.
    Prompt {
        place: usize,
        logprobs: Option<Vec<Option<PositionLogprobs>>>,
    },
    /// Tokens of the choice of this number, counted over all prompts.
    Pieces { index: usize, pieces: Vec<Piece> },
    /// A request failed, and the body with it.
    Failed(ApiError),
}

/// The requests of one body.
#[derive(Debug)]
pub(crate) struct Session {
    ticket: Ticket,
    /// Choice `j` of prompt `i` has the index `i * n + j`.
    readers: Vec<ChoiceReader>,
    n: usize,
    unfinished: usize,
    /// One for each choice.
    clocks: Vec<Clock>,
    metrics: Arc<Metrics>,
    trace: Option<Trace>,
    pub(crate) usage: Usage,
}

impl Session {
    pub(crate) fn new(
        ticket: Ticket,
        tokenizer: Option<&Arc<Tokenizer>>,
        options: &TextOptions,
        prompt_lengths: &[usize],
        n: u32,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, ApiError> {
        let count = prompt_lengths.len() * n as usize;
        let readers = (0..count)
            .map(|_| ChoiceReader::new(tokenizer.cloned(), options))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            ticket,
            readers,
            n: n as usize,
            unfinished: count,
            clocks: (0..count).map(|_| Clock::start()).collect(),
            metrics: Arc::clone(metrics),
            trace: trace::current(),
            usage: Usage::of_prompts(prompt_lengths.iter().sum()),
        })
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.unfinished == 0
    }

    /// Where events come from.
    pub(crate) fn ticket(&mut self) -> &mut Ticket {
        &mut self.ticket
    }

    /// Waits for the next step; none when all choices have ended.
    pub(crate) async fn next(&mut self) -> Option<Step> {
        if self.is_finished() {
            return None;
        }
        let event = self.ticket.events.recv().await;
        Some(self.take(event))
    }

    /// Makes of an event what it means.
    pub(crate) fn take(&mut self, event: Option<Event>) -> Step {
        let step = self.read(event);
        if let Some(trace) = &self.trace {
            match &step {
                Step::Prompt { .. } => {}
                Step::Pieces { .. } => trace.token(),
                Step::Failed(error) => trace.failed(&error.message),
            }
        }
        step
    }

    fn read(&mut self, event: Option<Event>) -> Step {
        let Some(Event { place, news }) = event else {
            return Step::Failed(ApiError::failed("the request was lost"));
        };
        match news {
            News::Failed(error) => Step::Failed(error),
            News::Vector(_) => Step::Failed(ApiError::failed("nobody asked for a vector")),
            News::Prompt {
                num_cached_tokens,
                logprobs,
            } => {
                self.usage.add_cached(num_cached_tokens);
                Step::Prompt {
                    place: place as usize,
                    logprobs,
                }
            }
            News::Choice(update) => {
                let choice = update.index;
                let index = place as usize * self.n + choice as usize;
                let engine_ended = update.finish.is_some();
                let pieces = self.readers[index].push(update);
                let tokens = pieces.iter().filter(|piece| piece.token.is_some()).count();
                self.usage.completion_tokens += tokens;
                self.clocks[index].tokens(tokens as u64, &self.metrics);
                match pieces.last().and_then(|piece| piece.ended.as_ref()) {
                    Some(Ended::Error) => {
                        self.clocks[index].end("error", &self.metrics);
                        return Step::Failed(ApiError::failed(
                            "the model gave no token that can be drawn",
                        ));
                    }
                    Some(ended) => {
                        self.unfinished -= 1;
                        if let Some(trace) = &self.trace {
                            trace.finished(ended.reason());
                        }
                        self.clocks[index].end(ended.reason(), &self.metrics);
                        if !engine_ended {
                            self.ticket.end_choice(place, choice);
                        }
                    }
                    None => {}
                }
                Step::Pieces { index, pieces }
            }
        }
    }
}

impl Drop for Session {
    /// What has not ended never will: its client is gone, or the body failed.
    fn drop(&mut self) {
        for clock in &mut self.clocks {
            clock.end("abort", &self.metrics);
        }
        if let Some(trace) = &self.trace {
            let usage = &self.usage;
            trace.used(
                usage.prompt_tokens,
                usage.cached_tokens(),
                usage.completion_tokens,
            );
        }
    }
}
