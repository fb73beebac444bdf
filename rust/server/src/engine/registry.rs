//! The truth of every request: what was asked and all tokens so far. An engine that dies takes none of it along.
//!
//! A request is in the engine under *wire* ids: one for all its choices at first, one for each unfinished choice once it goes on after a
//! restart. What comes for a wire id that is forgotten is dropped.
//!
//! The engines are replicas of each other: a router gives each request to one of them, all its choices together. Whoever is suspected of
//! killing an engine stays with that one and has it for himself, while everybody else goes on in the others.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use octavo_core::params::SamplingParams;
use octavo_router::{Prefix, Router};
use octavo_wire::{
    AddRequest, ChoiceUpdate, Finish, GrammarSource, PositionLogprobs, ToEngine, Update,
};
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
    /// What its outputs must be.
    pub(crate) grammar: Option<RequestGrammar>,
}

/// Tokens of each prompt.
pub(crate) fn prompt_lengths(requests: &[NewRequest]) -> Vec<usize> {
    requests.iter().map(|new| new.prompt.len()).collect()
}

/// A grammar, and the field that asked for it.
#[derive(Clone, Debug)]
pub(crate) struct RequestGrammar {
    pub(crate) param: String,
    pub(crate) source: Arc<GrammarSource>,
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
    /// The prompt as a vector.
    Vector(Vec<f32>),
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
    /// Of the prompt, for the router.
    prefix: Prefix,
    /// The replica it is in, and its wire ids there.
    home: Option<Home>,
}

/// Where a request is.
#[derive(Debug)]
struct Home {
    replica: usize,
    wires: Vec<u64>,
    /// Choices that it went there with.
    sequences: usize,
}

/// All unfinished requests.
#[derive(Debug)]
pub(crate) struct Registry {
    replicas: usize,
    inner: Mutex<Inner>,
    /// Signalled when the last request ends.
    pub(crate) emptied: Notify,
}

#[derive(Debug)]
struct Inner {
    last_id: u64,
    /// By arrival.
    requests: BTreeMap<u64, Request>,
    /// The request behind each wire id.
    wires: HashMap<u64, u64>,
    engines: Vec<Engine>,
    router: Router,
    /// Choices of all requests.
    sequences: usize,
}

/// One replica.
#[derive(Debug, Default)]
struct Engine {
    /// To its process, while that takes requests.
    sender: Option<mpsc::UnboundedSender<ToEngine>>,
    blame: Blame,
    /// Wire ids in it.
    wires: usize,
    /// When a request in it last got a token, or began to wait for its first.
    last_progress: Option<Instant>,
}

impl Engine {
    fn send(&self, message: ToEngine) {
        if let Some(sender) = &self.sender {
            // A dead engine's requests are sent again.
            let _ = sender.send(message);
        }
    }
}

impl Registry {
    /// No requests, and `replicas` engines that are not there yet.
    pub(crate) fn new(replicas: usize) -> Self {
        Self {
            replicas,
            inner: Mutex::new(Inner {
                last_id: 0,
                requests: BTreeMap::new(),
                wires: HashMap::new(),
                engines: (0..replicas).map(|_| Engine::default()).collect(),
                router: Router::new(replicas),
                sequences: 0,
            }),
            emptied: Notify::new(),
        }
    }

    /// What the router must know of a sequence; nothing if there is no choice.
    fn prefix(&self, namespace: u64, tokens: &[u32]) -> Prefix {
        if self.replicas > 1 {
            Prefix::new(namespace, tokens)
        } else {
            Prefix::default()
        }
    }

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
        // Outside of the lock: it takes longer than all the rest.
        let prefixes: Vec<Prefix> = requests
            .iter()
            .map(|new| self.prefix(new.namespace, &new.prompt))
            .collect();
        let mut inner = self.lock();
        if sequences > limit {
            return Err(SubmitError::TooMany(limit));
        }
        if inner.sequences + sequences > limit {
            return Err(SubmitError::Full(limit));
        }
        inner.sequences += sequences;
        for ((place, new), prefix) in (0..).zip(requests).zip(prefixes) {
            let id = inner.new_id();
            let choices = (0..new.params.n).map(|_| Choice::default()).collect();
            let request = Request {
                new,
                place,
                events: sender.clone(),
                choices,
                prompt_told: false,
                prefix,
                home: None,
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

    // -- for the supervisors ---------------------------------------------------------------------------------------

    /// An engine is there, with an empty cache of `cache_tokens` tokens: it gets requests that may run.
    pub(crate) fn connect(
        &self,
        replica: usize,
        engine: mpsc::UnboundedSender<ToEngine>,
        cache_tokens: u64,
    ) {
        let mut inner = self.lock();
        let state = &mut inner.engines[replica];
        state.sender = Some(engine);
        state.last_progress = Some(Instant::now());
        let cache_tokens = usize::try_from(cache_tokens).unwrap_or(usize::MAX);
        inner.router.connect(replica, cache_tokens);
        inner.recall_waiting();
        inner.dispatch_all();
    }

    /// An engine is dead, and its requests go elsewhere. `suspects` are the wire ids in its last steps; `from_outside` says that somebody
    /// else killed it. Returns whether a request was condemned.
    pub(crate) fn disconnect(&self, replica: usize, suspects: &[u64], from_outside: bool) -> bool {
        let mut inner = self.lock();
        inner.engines[replica].sender = None;
        let mut ids: Vec<u64> = suspects
            .iter()
            .filter_map(|wire| inner.wires.get(wire).copied())
            .collect();
        ids.sort_unstable();
        ids.dedup();
        inner.router.disconnect(replica);
        inner.forget_wires(replica);
        let condemned = inner.engines[replica].blame.died(ids, from_outside);
        if let Some(id) = condemned {
            let message =
                "the engine process died of this request, and died of it again when it ran alone";
            inner.fail(id, ApiError::failed(message));
        }
        inner.dispatch_all();
        self.note_empty(&inner);
        condemned.is_some()
    }

    /// An engine cannot be started any more for now: those that only it may run are ended.
    pub(crate) fn give_up(&self, replica: usize, error: &ApiError) {
        let mut inner = self.lock();
        for id in inner.engines[replica].blame.dismiss() {
            inner.fail(id, error.clone());
        }
        self.note_empty(&inner);
    }

    /// Takes what requests gained in an engine.
    pub(crate) fn update(&self, replica: usize, updates: Vec<Update>) {
        let mut inner = self.lock();
        inner.engines[replica].last_progress = Some(Instant::now());
        for update in updates {
            self.take(&mut inner, update);
        }
        self.note_empty(&inner);
    }

    /// An engine will never run a request.
    pub(crate) fn refuse(&self, wire: u64, message: String) {
        let mut inner = self.lock();
        if let Some(&id) = inner.wires.get(&wire) {
            inner.fail(id, ApiError::invalid(message));
        }
        self.note_empty(&inner);
    }

    /// An engine showed that it works.
    pub(crate) fn progressed(&self, replica: usize) {
        self.lock().engines[replica].last_progress = Some(Instant::now());
    }

    /// Asks an engine process to end; its requests go on elsewhere, or in the next one.
    pub(crate) fn stop_engine(&self, replica: usize) {
        self.lock().engines[replica].send(ToEngine::Shutdown);
    }

    /// Asks the engines how far they are; which ones there are.
    pub(crate) fn ping(&self) -> Vec<usize> {
        let inner = self.lock();
        for engine in &inner.engines {
            engine.send(ToEngine::Ping { nonce: 0 });
        }
        let is_up = |&replica: &usize| inner.engines[replica].sender.is_some();
        (0..self.replicas).filter(is_up).collect()
    }

    /// Asks an engine for a picture of itself; false if it is not there to be asked.
    pub(crate) fn inspect(&self, replica: usize) -> bool {
        let inner = self.lock();
        let engine = &inner.engines[replica];
        engine.send(ToEngine::Inspect);
        engine.sender.is_some()
    }

    /// Whether an engine takes requests.
    pub(crate) fn is_any_up(&self) -> bool {
        let inner = self.lock();
        inner.engines.iter().any(|engine| engine.sender.is_some())
    }

    /// Since when a request in an engine waits for progress; none if there is nothing to wait for.
    pub(crate) fn waiting_since(&self, replica: usize) -> Option<Instant> {
        let inner = self.lock();
        let engine = &inner.engines[replica];
        engine.last_progress.filter(|_| engine.wires > 0)
    }

    /// Takes what one request gained; an end is remembered, since the next question may go on from it.
    fn take(&self, inner: &mut Inner, update: Update) {
        let Some(&id) = inner.wires.get(&update.id) else {
            return;
        };
        if self.replicas > 1 {
            for choice in update.choices.iter().filter(|one| one.finish.is_some()) {
                inner.learn(id, choice);
            }
        }
        inner.update(id, update);
    }
}

impl Inner {
    fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// The engine for a request: the one that suspects it, if that has its turn for it; else one where nobody is suspected.
    fn choose(&mut self, id: u64, prefix: &Prefix, sequences: usize) -> Option<usize> {
        let engines = &self.engines;
        let accuser = engines.iter().position(|one| one.blame.suspects(id));
        self.router.route(prefix, sequences, |replica| {
            engines[replica].blame.admits(id) && accuser.is_none_or(|one| one == replica)
        })
    }

    /// Gives a request to an engine if it is in none and may run.
    fn dispatch(&mut self, id: u64) {
        let Some(request) = self.requests.get(&id).filter(|one| one.home.is_none()) else {
            return;
        };
        let sequences = request.choices.iter().filter(|one| !one.ended).count();
        let prefix = request.prefix.clone();
        let Some(replica) = self.choose(id, &prefix, sequences) else {
            return;
        };
        let messages = self
            .requests
            .get(&id)
            .map_or_else(Vec::new, Request::messages);
        if self.engines[replica].wires == 0 {
            self.engines[replica].last_progress = Some(Instant::now());
        }
        let mut wires = Vec::with_capacity(messages.len());
        for mut add in messages {
            add.id = self.new_id();
            wires.push(add.id);
            self.wires.insert(add.id, id);
            self.engines[replica].wires += 1;
            self.engines[replica].send(ToEngine::Add(Box::new(add)));
        }
        if let Some(request) = self.requests.get_mut(&id) {
            request.home = Some(Home {
                replica,
                wires,
                sequences,
            });
        }
    }

    fn dispatch_all(&mut self) {
        let ids: Vec<u64> = self.requests.keys().copied().collect();
        for id in ids {
            self.dispatch(id);
        }
    }

    /// Another group of suspects has its turn in an engine, or everybody has again.
    fn change_turns(&mut self, replica: usize) {
        let blame = &self.engines[replica].blame;
        let is_out = |(&id, request): (&u64, &Request)| {
            let here = request
                .home
                .as_ref()
                .is_some_and(|home| home.replica == replica);
            (here && !blame.admits(id)).then_some(id)
        };
        let out: Vec<u64> = self.requests.iter().filter_map(is_out).collect();
        for id in out {
            self.recall(id);
        }
        self.dispatch_all();
    }

    /// Takes a request out of its engine.
    fn recall(&mut self, id: u64) {
        let Some(home) = self.requests.get_mut(&id).and_then(|one| one.home.take()) else {
            return;
        };
        self.router.finish(home.replica, home.sequences);
        for wire in home.wires {
            self.drop_wire(home.replica, wire);
            self.engines[home.replica].send(ToEngine::Abort { id: wire });
        }
    }

    /// Requests without a token so far may find a better place than the one they have.
    fn recall_waiting(&mut self) {
        let engines = &self.engines;
        let waits = |(&id, request): (&u64, &Request)| {
            let suspected = engines.iter().any(|one| one.blame.suspects(id));
            (!request.prompt_told && !suspected).then_some(id)
        };
        let waiting: Vec<u64> = self.requests.iter().filter_map(waits).collect();
        for id in waiting {
            self.recall(id);
        }
    }

    fn drop_wire(&mut self, replica: usize, wire: u64) {
        if self.wires.remove(&wire).is_some() {
            self.engines[replica].wires -= 1;
        }
    }

    /// No request is in this engine any more.
    fn forget_wires(&mut self, replica: usize) {
        for request in self.requests.values_mut() {
            if let Some(home) = request.home.take_if(|home| home.replica == replica) {
                for wire in home.wires {
                    self.wires.remove(&wire);
                }
            }
        }
        self.engines[replica].wires = 0;
    }

    /// Remembers in whose cache the whole of a choice is, its last tokens among it.
    fn learn(&mut self, id: u64, last: &ChoiceUpdate) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let (Some(home), Some(choice)) = (&request.home, request.choices.get(last.index as usize))
        else {
            return;
        };
        let tokens = [&request.new.prompt[..], &choice.outputs, &last.token_ids].concat();
        let prefix = Prefix::new(request.new.namespace, &tokens);
        self.router.learn(home.replica, &prefix);
    }

    /// Forgets a request, and tells the engine if it still works on it.
    fn remove(&mut self, id: u64) {
        self.recall(id);
        if let Some(request) = self.requests.remove(&id) {
            self.sequences -= request.choices.len();
            for replica in 0..self.engines.len() {
                if self.engines[replica].blame.leave(id) {
                    self.change_turns(replica);
                }
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
        if let Some(home) = &request.home {
            for &id in &home.wires {
                self.engines[home.replica].send(ToEngine::AbortChoice { id, choice });
            }
        }
    }

    fn update(&mut self, id: u64, mut update: Update) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        // Nobody here asks for such an end: the engine is going, and of the prompt it says nothing that counts.
        update
            .choices
            .retain(|one| one.finish != Some(Finish::Abort) || !one.token_ids.is_empty());
        let home = request.home.as_mut();
        let replica = home.as_ref().map(|home| home.replica);
        if let (true, Some(home)) = (update.finished, home) {
            home.wires.retain(|&wire| wire != update.id);
            self.wires.remove(&update.id);
            self.engines[home.replica].wires -= 1;
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
        if let Some(vector) = update.pooled {
            request.tell(News::Vector(vector));
        }
        let mut gained = false;
        for choice in update.choices {
            gained |= request.extend(choice);
        }
        let ended = request.has_ended();
        if let Some(replica) = replica.filter(|_| gained)
            && self.engines[replica].blame.progressed(id)
        {
            self.change_turns(replica);
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
            grammar: self
                .new
                .grammar
                .as_ref()
                .map(|grammar| Arc::clone(&grammar.source)),
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
