//! The truth of every request: what was asked and all tokens so far. An engine that dies takes none of it along.
//!
//! A request is in the engine under *wire* ids: one for all its choices at first, one for each unfinished choice once it goes on after a
//! restart. What comes for a wire id that is forgotten is dropped.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use octavo_core::params::SamplingParams;
use octavo_wire::{AddRequest, ChoiceUpdate, Finish, PositionLogprobs, ToEngine, Update};
use tokio::sync::{Notify, mpsc};

use super::blame::Blame;
use crate::error::ApiError;

/// A request that has been checked whole.
#[derive(Clone, Debug)]
pub(crate) struct NewRequest {
    /// Token ids, at least one.
    pub(crate) prompt: Vec<u32>,
    pub(crate) params: SamplingParams,
    pub(crate) priority: i32,
    pub(crate) tenant: u64,
    pub(crate) namespace: u64,
}

/// News of one request of a ticket.
#[derive(Debug)]
pub(crate) struct Event {
    /// Which request of those submitted together.
    pub(crate) place: u32,
    pub(crate) news: News,
}

/// What happened to a request.
#[derive(Debug)]
pub(crate) enum News {
    /// Prompt tokens found in the cache, and the log-probabilities of the prompt; told once, before the first token.
    Prompt {
        num_cached_tokens: u32,
        logprobs: Option<Vec<Option<PositionLogprobs>>>,
    },
    /// Tokens of one choice.
    Choice(ChoiceUpdate),
    /// It ends here: whatever else it had to say is lost.
    Failed(ApiError),
}

/// Requests submitted together. Dropping it withdraws those that have not ended.
#[derive(Debug)]
pub(crate) struct Ticket {
    registry: Arc<Registry>,
    ids: Vec<u64>,
    pub(crate) events: mpsc::UnboundedReceiver<Event>,
}

impl Ticket {
    /// Ends one choice whose stop string was met; nothing more comes of it.
    pub(crate) fn end_choice(&self, place: u32, choice: u32) {
        self.registry.end_choice(self.ids[place as usize], choice);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        for &id in &self.ids {
            self.registry.withdraw(id);
        }
    }
}

/// Requests that cannot be taken now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SubmitError {
    /// More sequences than may run and wait; the limit.
    Full(usize),
    /// More sequences than ever fit; the limit.
    TooMany(usize),
}

#[derive(Debug, Default)]
struct Choice {
    outputs: Vec<u32>,
    ended: bool,
}

#[derive(Debug)]
struct Request {
    new: NewRequest,
    place: u32,
    events: mpsc::UnboundedSender<Event>,
    choices: Vec<Choice>,
    /// The client knows of the prompt.
    prompt_told: bool,
    /// Wire ids of it in the engine.
    wires: Vec<u64>,
}

/// All unfinished requests.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    inner: Mutex<Inner>,
    /// Signalled when the last request ends.
    pub(crate) emptied: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    last_id: u64,
    /// By arrival.
    requests: BTreeMap<u64, Request>,
    /// The request behind each wire id.
    wires: HashMap<u64, u64>,
    /// The engine, while it takes requests.
    engine: Option<mpsc::UnboundedSender<ToEngine>>,
    blame: Blame,
    /// Choices of all requests.
    sequences: usize,
    /// When a request last got a token, or began to wait for its first.
    last_progress: Option<Instant>,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Whoever panicked has been reported; what it left is consistent between statements.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes requests, all or none; `limit` sequences may be here in all.
    pub(crate) fn submit(
        self: &Arc<Self>,
        requests: Vec<NewRequest>,
        limit: usize,
    ) -> Result<Ticket, SubmitError> {
        let (sender, events) = mpsc::unbounded_channel();
        let sequences: usize = requests.iter().map(|new| new.params.n as usize).sum();
        let mut ids = Vec::with_capacity(requests.len());
        let mut inner = self.lock();
        if sequences > limit {
            return Err(SubmitError::TooMany(limit));
        }
        if inner.sequences + sequences > limit {
            return Err(SubmitError::Full(limit));
        }
        inner.sequences += sequences;
        for (place, new) in (0..).zip(requests) {
            let id = inner.new_id();
            let choices = (0..new.params.n).map(|_| Choice::default()).collect();
            let request = Request {
                new,
                place,
                events: sender.clone(),
                choices,
                prompt_told: false,
                wires: Vec::new(),
            };
            inner.requests.insert(id, request);
            ids.push(id);
            inner.dispatch(id);
        }
        Ok(Ticket {
            registry: Arc::clone(self),
            ids,
            events,
        })
    }

    fn withdraw(&self, id: u64) {
        let mut inner = self.lock();
        inner.remove(id);
        self.note_empty(&inner);
    }

    fn end_choice(&self, id: u64, choice: u32) {
        let mut inner = self.lock();
        inner.end_choice(id, choice);
        self.note_empty(&inner);
    }

    fn note_empty(&self, inner: &Inner) {
        if inner.requests.is_empty() {
            self.emptied.notify_waiters();
        }
    }

    /// Requests that have not ended.
    pub(crate) fn len(&self) -> usize {
        self.lock().requests.len()
    }

    /// Ends every request with an error.
    pub(crate) fn fail_all(&self, error: &ApiError) {
        let mut inner = self.lock();
        let ids: Vec<u64> = inner.requests.keys().copied().collect();
        for id in ids {
            inner.fail(id, error.clone());
        }
        self.note_empty(&inner);
    }

    // -- for the supervisor ----------------------------------------------------------------------------------------

    /// An engine is there: it gets every request that may run.
    pub(crate) fn connect(&self, engine: mpsc::UnboundedSender<ToEngine>) {
        let mut inner = self.lock();
        inner.engine = Some(engine);
        inner.last_progress = Some(Instant::now());
        inner.dispatch_all();
    }

    /// The engine is dead. `suspects` are the wire ids in its last steps; `from_outside` says that somebody else killed it. Returns whether a
    /// request was condemned.
    pub(crate) fn disconnect(&self, suspects: &[u64], from_outside: bool) -> bool {
        let mut inner = self.lock();
        inner.engine = None;
        let wires = std::mem::take(&mut inner.wires);
        for request in inner.requests.values_mut() {
            request.wires.clear();
        }
        let mut ids: Vec<u64> = suspects
            .iter()
            .filter_map(|wire| wires.get(wire).copied())
            .filter(|id| inner.requests.contains_key(id))
            .collect();
        ids.sort_unstable();
        ids.dedup();
        let condemned = inner.blame.died(ids, from_outside);
        if let Some(id) = condemned {
            let message =
                "the engine process died of this request, and died of it again when it ran alone";
            inner.fail(id, ApiError::failed(message));
        }
        self.note_empty(&inner);
        condemned.is_some()
    }

    /// Takes what requests gained.
    pub(crate) fn update(&self, updates: Vec<Update>) {
        let mut inner = self.lock();
        for update in updates {
            inner.update(update);
        }
        self.note_empty(&inner);
    }

    /// The engine will never run a request.
    pub(crate) fn refuse(&self, wire: u64, message: String) {
        let mut inner = self.lock();
        if let Some(&id) = inner.wires.get(&wire) {
            inner.fail(id, ApiError::invalid(message));
        }
        self.note_empty(&inner);
    }

    /// The engine showed that it works.
    pub(crate) fn progressed(&self) {
        self.lock().last_progress = Some(Instant::now());
    }

    /// Asks the engine process to end; its requests go on in the next one.
    pub(crate) fn stop_engine(&self) {
        self.lock().send(ToEngine::Shutdown);
    }

    /// Asks the engine how far it is; false if there is none.
    pub(crate) fn ping(&self) -> bool {
        let inner = self.lock();
        inner.send(ToEngine::Ping { nonce: 0 });
        inner.engine.is_some()
    }

    /// Asks the engine for a picture of itself; false if there is none to ask.
    pub(crate) fn inspect(&self) -> bool {
        let inner = self.lock();
        inner.send(ToEngine::Inspect);
        inner.engine.is_some()
    }

    /// Since when a request in the engine waits for progress; none if there is nothing to wait for.
    pub(crate) fn waiting_since(&self) -> Option<Instant> {
        let inner = self.lock();
        inner.last_progress.filter(|_| !inner.wires.is_empty())
    }
}

impl Inner {
    fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn send(&self, message: ToEngine) {
        if let Some(engine) = &self.engine {
            // A dead engine's requests are sent again to the next one.
            let _ = engine.send(message);
        }
    }

    /// Gives a request to the engine if it may run and is not there.
    fn dispatch(&mut self, id: u64) {
        if self.engine.is_none() || !self.blame.admits(id) {
            return;
        }
        if self.wires.is_empty() {
            self.last_progress = Some(Instant::now());
        }
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        if !request.wires.is_empty() {
            return;
        }
        for mut add in request.messages() {
            add.id = self.new_id();
            self.wires.insert(add.id, id);
            if let Some(request) = self.requests.get_mut(&id) {
                request.wires.push(add.id);
            }
            self.send(ToEngine::Add(Box::new(add)));
        }
    }

    fn dispatch_all(&mut self) {
        let ids: Vec<u64> = self.requests.keys().copied().collect();
        for id in ids {
            self.dispatch(id);
        }
    }

    /// Another group of suspects has its turn, or everybody has again.
    fn change_turns(&mut self) {
        let out: Vec<u64> = self
            .requests
            .keys()
            .copied()
            .filter(|&id| !self.blame.admits(id))
            .collect();
        for id in out {
            self.recall(id);
        }
        self.dispatch_all();
    }

    /// Takes a request out of the engine.
    fn recall(&mut self, id: u64) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        for wire in std::mem::take(&mut request.wires) {
            self.wires.remove(&wire);
            self.send(ToEngine::Abort { id: wire });
        }
    }

    /// Forgets a request, and tells the engine if it still works on it.
    fn remove(&mut self, id: u64) {
        self.recall(id);
        if let Some(request) = self.requests.remove(&id) {
            self.sequences -= request.choices.len();
            if self.blame.leave(id) {
                self.change_turns();
            }
        }
    }

    fn fail(&mut self, id: u64, error: ApiError) {
        if let Some(request) = self.requests.get(&id) {
            request.tell(News::Failed(error));
        }
        self.remove(id);
    }

    fn end_choice(&mut self, id: u64, choice: u32) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        let state = &mut request.choices[choice as usize];
        if std::mem::replace(&mut state.ended, true) {
            return;
        }
        if request.has_ended() {
            self.remove(id);
            return;
        }
        // The engine leaves a wire id alone that has no such choice.
        for id in request.wires.clone() {
            self.send(ToEngine::AbortChoice { id, choice });
        }
    }

    fn update(&mut self, update: Update) {
        self.last_progress = Some(Instant::now());
        let Some(&id) = self.wires.get(&update.id) else {
            return;
        };
        if update.finished {
            self.wires.remove(&update.id);
        }
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        if update.finished {
            request.wires.retain(|&wire| wire != update.id);
        }
        if let Some(message) = update.error {
            self.fail(id, ApiError::failed(message));
            return;
        }
        let (cached, logprobs) = (update.num_cached_tokens, update.prompt_logprobs);
        if !request.prompt_told && (!update.choices.is_empty() || logprobs.is_some()) {
            request.prompt_told = true;
            request.tell(News::Prompt {
                num_cached_tokens: cached,
                logprobs,
            });
        }
        let mut gained = false;
        for choice in update.choices {
            gained |= request.extend(choice);
        }
        let ended = request.has_ended();
        if gained && self.blame.progressed(id) {
            self.change_turns();
        }
        if ended {
            self.remove(id);
        }
    }
}

impl Request {
    fn tell(&self, news: News) {
        // A client that is gone withdraws its requests.
        let _ = self.events.send(Event {
            place: self.place,
            news,
        });
    }

    fn has_ended(&self) -> bool {
        self.choices.iter().all(|choice| choice.ended)
    }

    /// Takes tokens of a choice; true if there were any.
    fn extend(&mut self, mut update: ChoiceUpdate) -> bool {
        let Some(choice) = self.choices.get_mut(update.index as usize) else {
            return false;
        };
        if choice.ended {
            return false;
        }
        if update.finish == Some(Finish::Abort) {
            // Nobody here asked for it: the engine is going, and the choice goes on in the next one.
            update.finish = None;
        }
        if update.token_ids.is_empty() && update.finish.is_none() {
            return false;
        }
        choice.outputs.extend_from_slice(&update.token_ids);
        choice.ended = update.finish.is_some();
        self.tell(News::Choice(update));
        true
    }

    /// What the engine needs to begin or to go on; wire ids are not set.
    fn messages(&self) -> Vec<AddRequest> {
        let message = |tokens: Vec<u32>, params: SamplingParams, first_choice| AddRequest {
            id: 0,
            num_prompt_tokens: self.new.prompt.len() as u32,
            tokens,
            first_choice,
            params,
            priority: self.new.priority,
            tenant: self.new.tenant,
            namespace: self.new.namespace,
        };
        let mut params = self.new.params.clone();
        let is_new = |choice: &Choice| choice.outputs.is_empty() && !choice.ended;
        if self.choices.iter().all(is_new) && !self.prompt_told {
            return vec![message(self.new.prompt.clone(), params, 0)];
        }
        params.n = 1;
        let mut messages = Vec::new();
        for (index, choice) in (0..).zip(&self.choices) {
            if choice.ended {
                continue;
            }
            let mut params = params.clone();
            if self.prompt_told || !messages.is_empty() {
                params.prompt_logprobs = None;
            }
            let tokens = [&self.new.prompt[..], &choice.outputs].concat();
            messages.push(message(tokens, params, index));
        }
        messages
    }
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
