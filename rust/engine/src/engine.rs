//! The control plane with its threads: requests come from any thread, steps belong to the loop's thread.
//!
//! Locks are taken in the order *inbox, core, masks, collector, mailbox* (or, alone below the core, the log of steps) and never held while Python runs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use octavo_core::config::{ConfigError, CoreConfig};
use octavo_core::ids::{Namespace, RequestId, StepId, TenantId};
use octavo_core::output::{CommitError, FinishReason, Output, StepResults};
use octavo_core::params::{Limits, ParamError, SamplingParams};
use octavo_core::plan::header;
use octavo_core::request::{AddError, AddRequest};
use octavo_core::scheduler::Core;
use octavo_core::stats::Stats;
use octavo_grammar::compiler::{Compiler, Grammar, GrammarError, Vocabulary};
use octavo_text::output::{ChoiceText, OutputError, TextOptions};
use octavo_text::tokenizer::Tokenizer;
use octavo_wire::{EngineState, GrammarSource};
use thiserror::Error;

use crate::collector::{Collector, NewRequest, NewTokens};
use crate::journal::Journal;
use crate::mailbox::Mailbox;
use crate::masks::Masks;
use crate::snapshot;
use crate::steps::StepLog;
use crate::update::{Finish, PositionLogprobs, Update};

/// A request as its caller gives it.
#[derive(Debug)]
pub struct Submission {
    /// Token ids of the prompt, then of what it produced before, if it goes on.
    pub tokens: Vec<u32>,
    /// How many of `tokens` are the prompt.
    pub num_prompt_tokens: u32,
    /// Number of its first choice.
    pub first_choice: u32,
    /// Checked and resolved.
    pub params: SamplingParams,
    /// Make text of the output tokens.
    pub detokenize: bool,
    /// How its text is made.
    pub text: TextOptions,
    /// Lower runs first.
    pub priority: i32,
    /// Whom fairness counts the tokens for.
    pub tenant: TenantId,
    /// Prefixes are shared within it only.
    pub namespace: Namespace,
    /// Report every step instead of the end alone.
    pub stream: bool,
    /// What its outputs must be.
    pub grammar: Option<Arc<GrammarSource>>,
}

/// Log-probabilities of a step's sampled tokens: `[R * (1 + k) * width]` and `[R * (1 + k)]`, row-major.
#[derive(Clone, Copy, Debug)]
pub struct StepLogprobs<'a> {
    /// `1 + top`.
    pub width: usize,
    /// The sampled token, then the likeliest in order.
    pub ids: &'a [i32],
    /// One for each id.
    pub values: &'a [f32],
    /// Rank of the sampled token, from 1.
    pub ranks: &'a [i32],
}

/// Log-probabilities of consecutive prompt tokens of one row: `[n * width]` and `[n]`.
#[derive(Clone, Copy, Debug)]
pub struct PromptLogprobs<'a> {
    /// Row of the step.
    pub row: u32,
    /// Position of the first scored token.
    pub start: usize,
    /// The scores.
    pub scores: StepLogprobs<'a>,
}

/// The vector of the prompt that a row of a step has completed.
#[derive(Clone, Copy, Debug)]
pub struct Pooled<'a> {
    /// Row of the step.
    pub row: u32,
    /// `[hidden size]`.
    pub vector: &'a [f32],
}

/// What a step brings beside its tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras<'a> {
    /// Of the sampled tokens.
    pub logprobs: Option<StepLogprobs<'a>>,
    /// Of prompt tokens.
    pub prompt_logprobs: &'a [PromptLogprobs<'a>],
    /// Of whole prompts.
    pub pooled: &'a [Pooled<'a>],
}

/// The engine cannot take a request or a step.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The request can never run.
    #[error(transparent)]
    Add(#[from] AddError),
    /// A sampling parameter is out of its range, or leaves no token to draw.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// The results are not those of the step.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// Arrays of log-probabilities that do not fit each other or the step.
    #[error("step_id = {0}: the log-probabilities do not have the shape of the step")]
    Scores(StepId),
    /// A size the control plane cannot work with.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A grammar that cannot be compiled.
    #[error("the grammar cannot be used: {0}")]
    Grammar(#[from] GrammarError),
    /// A grammar is over text.
    #[error("structured output needs the tokenizer, and the engine runs without one")]
    NoTokenizer,
    /// Stop strings that cannot be searched for.
    #[error(transparent)]
    Text(#[from] OutputError),
    /// The engine has ended.
    #[error("{0}")]
    ShutDown(String),
}

/// A request that the core has not seen.
type Added = (AddRequest, Option<Arc<Grammar>>);

#[derive(Debug, Default)]
struct Inbox {
    added: Vec<Added>,
    /// Requests, or one choice of each.
    aborted: Vec<(RequestId, Option<u32>)>,
    /// Why the engine takes no more requests.
    closed: Option<String>,
    /// How many callers want no step to be in flight.
    pauses: u32,
    /// The loop is inside `wait`: no step is in flight.
    idle: bool,
}

/// One engine: the core, its queue, and the requests' truth.
#[derive(Debug)]
pub struct Engine {
    config: CoreConfig,
    limits: Limits,
    tokenizer: Option<Arc<Tokenizer>>,
    grammars: Option<Compiler>,
    next_id: AtomicU64,
    inbox: Mutex<Inbox>,
    /// Signalled when the inbox changes.
    changed: Condvar,
    core: Mutex<Core>,
    masks: Mutex<Masks>,
    collector: Mutex<Collector>,
    journal: OnceLock<Mutex<Journal>>,
    steps: Mutex<StepLog>,
}

/// What minus infinity is told as: JSON has no infinities.
const LOWEST_LOGPROB: f32 = -9999.0;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere has been reported by whoever panicked; the data is checked by `check_integrity`, not by poison.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// An engine with no requests. Without a tokenizer it gives token ids only. `eos_token_ids` end outputs that have a grammar.
    ///
    /// # Errors
    /// A size that the control plane cannot work with.
    pub fn new(
        config: CoreConfig,
        limits: Limits,
        tokenizer: Option<Arc<Tokenizer>>,
        eos_token_ids: Vec<u32>,
    ) -> Result<Self, EngineError> {
        let grammars = tokenizer.clone().map(|tokenizer| {
            Compiler::new(Vocabulary {
                tokenizer,
                vocab_size: config.vocab_size,
                eos_token_ids,
            })
        });
        Ok(Self {
            masks: Mutex::new(Masks::new(config.vocab_size)),
            grammars,
            core: Mutex::new(Core::new(config.clone())?),
            steps: Mutex::new(StepLog::new(
                config.bytes_per_block / u64::from(config.block_size),
            )),
            config,
            limits,
            tokenizer,
            next_id: AtomicU64::new(1),
            inbox: Mutex::default(),
            changed: Condvar::new(),
            collector: Mutex::default(),
            journal: OnceLock::new(),
        })
    }

    /// The sizes it was made with.
    #[must_use]
    pub fn config(&self) -> &CoreConfig {
        &self.config
    }

    // -- any thread ------------------------------------------------------------------------------------------------

    /// Takes a request; its updates go to `mailbox`. Returns at once.
    ///
    /// # Errors
    /// The request can never run, or the engine has ended.
    pub fn add(
        self: &Arc<Self>,
        submission: Submission,
        mailbox: &Arc<Mailbox>,
    ) -> Result<RequestId, EngineError> {
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        self.add_as(id, submission, mailbox)?;
        Ok(id)
    }

    /// As [`Engine::add`], under an id that the caller has chosen and never used before.
    ///
    /// # Errors
    /// The request can never run, or the engine has ended.
    pub fn add_as(
        self: &Arc<Self>,
        id: RequestId,
        submission: Submission,
        mailbox: &Arc<Mailbox>,
    ) -> Result<(), EngineError> {
        let Submission {
            tokens,
            num_prompt_tokens,
            first_choice,
            params,
            detokenize,
            text,
            priority,
            tenant,
            namespace,
            stream,
            grammar,
        } = submission;
        params.validate(self.config.vocab_size, &self.limits)?;
        if grammar.is_some() {
            params.validate_with_grammar()?;
        }
        let texts = (0..params.n)
            .map(|_| {
                ChoiceText::new(
                    if detokenize {
                        self.tokenizer.clone()
                    } else {
                        None
                    },
                    &text,
                )
            })
            .collect::<Result<Vec<_>, _>>()?;
        let new = NewRequest {
            id,
            mailbox: Arc::clone(mailbox),
            stream,
            num_prompt_tokens: num_prompt_tokens as usize,
            first_choice,
            num_logprobs: params.logprobs,
            num_prompt_logprobs: params.prompt_logprobs,
            include_stop: text.include_stop_str_in_output,
            texts,
        };
        let request = AddRequest {
            id,
            tokens,
            num_prompt_tokens,
            params,
            first_choice,
            priority,
            tenant,
            namespace,
            has_grammar: grammar.is_some(),
        };
        lock(&self.core).check_request(&request)?;
        let compiler = match (&grammar, &self.grammars) {
            (Some(_), None) => return Err(EngineError::NoTokenizer),
            (_, compiler) => compiler,
        };
        let mut inbox = lock(&self.inbox);
        if let Some(reason) = &inbox.closed {
            return Err(EngineError::ShutDown(reason.clone()));
        }
        // Before the loop can see the request, so that its first output finds it.
        lock(&self.collector).insert(new);
        if let (Some(source), Some(compiler)) = (grammar, compiler) {
            drop(inbox);
            let engine = Arc::downgrade(self);
            compiler.request(source, move |result| {
                if let Some(engine) = engine.upgrade() {
                    engine.add_compiled(request, result);
                }
            });
            return Ok(());
        }
        inbox.added.push((request, None));
        self.changed.notify_all();
        Ok(())
    }

    /// The grammar of a request is compiled, or cannot be.
    fn add_compiled(&self, request: AddRequest, result: Result<Arc<Grammar>, GrammarError>) {
        let mut inbox = lock(&self.inbox);
        let mut collector = lock(&self.collector);
        match result {
            // An abort tells the collector before it looks into the inbox.
            Ok(grammar) if collector.is_unfinished(request.id) => {
                inbox.added.push((request, Some(grammar)));
                self.changed.notify_all();
            }
            Ok(_) => {}
            Err(error) => {
                let reason = EngineError::from(error).to_string();
                collector.end(request.id, &Finish::Error, Some(reason));
            }
        }
    }

    /// Makes what the first grammar would have to wait for; takes up to seconds.
    pub fn prepare_grammars(&self) {
        if let Some(grammars) = &self.grammars {
            grammars.prepare();
        }
    }

    /// Compiles a grammar and keeps it for the requests that will have it; waits for that at most a few seconds.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn check_grammar(&self, source: Arc<GrammarSource>) -> Result<(), EngineError> {
        let compiler = self.grammars.as_ref().ok_or(EngineError::NoTokenizer)?;
        compiler.compile(source)?;
        Ok(())
    }

    /// Ends a request now; its blocks come back with the next step. Unknown and finished requests are left alone.
    pub fn abort(&self, id: RequestId) {
        lock(&self.collector).end(id, &Finish::Abort, None);
        let mut inbox = lock(&self.inbox);
        inbox.aborted.push((id, None));
        self.changed.notify_all();
    }

    /// As [`Engine::abort`], for one choice.
    pub fn abort_choice(&self, id: RequestId, choice: u32) {
        lock(&self.collector).end_choice(id, choice, Finish::Abort);
        let mut inbox = lock(&self.inbox);
        inbox.aborted.push((id, Some(choice)));
        self.changed.notify_all();
    }

    /// Waits at most `timeout` for news of the requests that report to `mailbox`.
    pub fn receive(&self, mailbox: &Mailbox, timeout: Duration) -> Vec<Update> {
        let ready = mailbox.wait(timeout);
        let mut collector = lock(&self.collector);
        ready
            .into_iter()
            .filter_map(|id| collector.take(id))
            .collect()
    }

    /// Forgets every cached prefix; blocks of running requests stay.
    pub fn reset_prefix_cache(&self) {
        lock(&self.core).reset_prefix_cache();
    }

    /// From now on, notes in `journal` which requests are in the steps in flight. The first one given stays.
    pub fn keep_journal(&self, journal: Journal) {
        // A second one would have two writers of one file.
        let _ = self.journal.set(Mutex::new(journal));
    }

    /// Steps committed so far.
    pub fn num_steps(&self) -> u64 {
        lock(&self.core).last_committed().0
    }

    /// Counters of the control plane.
    pub fn stats(&self) -> Stats {
        lock(&self.core).stats()
    }

    /// A picture of the engine for people. Holds the control plane for a small part of the pool at a time; what is made of the parts is made
    /// on the caller's thread.
    pub fn inspect(&self) -> EngineState {
        let (blocks, mut held) = snapshot::copy_blocks(self.config.num_blocks, |ids, out| {
            let core = lock(&self.core);
            snapshot::timed(|| core.view_blocks(ids, out))
        });
        let mut state = EngineState {
            block_size: self.config.block_size,
            bytes_per_block: self.config.bytes_per_block,
            map: snapshot::map(&blocks),
            tree: snapshot::tree(&blocks),
            ..EngineState::default()
        };
        {
            let core = lock(&self.core);
            let time = snapshot::timed(|| state.stats = core.stats());
            held.longest = held.longest.max(time);
            held.total += time;
        }
        let steps = lock(&self.steps);
        state.now_us = steps.now_us();
        state.steps = steps.latest();
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        state.held_us = (micros(held.longest), micros(held.total));
        state
    }

    /// Requests that have not been fetched to their end.
    pub fn num_unfetched(&self) -> usize {
        lock(&self.collector).len()
    }

    /// Recomputes every count and set of the control plane and compares.
    ///
    /// # Errors
    /// What does not agree.
    pub fn check_integrity(&self) -> Result<(), String> {
        lock(&self.core).check_integrity()
    }

    /// Returns once no step is in flight; none starts until `resume`. Pauses nest.
    pub fn pause(&self) {
        let mut inbox = lock(&self.inbox);
        inbox.pauses += 1;
        while !inbox.idle && inbox.closed.is_none() {
            inbox = self
                .changed
                .wait(inbox)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Undoes one `pause`.
    pub fn resume(&self) {
        let mut inbox = lock(&self.inbox);
        inbox.pauses = inbox.pauses.saturating_sub(1);
        self.changed.notify_all();
    }

    /// Ends every request with `abort` and takes no more.
    pub fn shut_down(&self) {
        self.close("the engine has been shut down", &Finish::Abort, None);
    }

    /// Ends every request with an error and takes no more: the loop cannot go on.
    pub fn fail(&self, reason: &str) {
        self.close(reason, &Finish::Error, Some(reason));
    }

    /// Whether the engine takes no more requests.
    #[must_use]
    pub fn is_shut_down(&self) -> bool {
        lock(&self.inbox).closed.is_some()
    }

    fn close(&self, reason: &str, finish: &Finish, error: Option<&str>) {
        let mut inbox = lock(&self.inbox);
        inbox.closed.get_or_insert_with(|| reason.to_owned());
        lock(&self.collector).end_all(finish, error);
        self.changed.notify_all();
    }

    // -- the loop's thread -----------------------------------------------------------------------------------------

    /// Waits until there is something to do. Costs no CPU.
    pub fn wait(&self) {
        let has_work = lock(&self.core).has_work();
        let mut inbox = lock(&self.inbox);
        inbox.idle = true;
        self.changed.notify_all();
        while inbox.closed.is_none()
            && (inbox.pauses > 0
                || !(has_work || !inbox.added.is_empty() || !inbox.aborted.is_empty()))
        {
            inbox = self
                .changed
                .wait(inbox)
                .unwrap_or_else(PoisonError::into_inner);
        }
        inbox.idle = false;
    }

    /// Takes in what came since the last call and writes the next step's plan, if there is one.
    pub fn schedule(&self, plan: &mut [i32]) -> Option<StepId> {
        let (added, aborted) = {
            let mut inbox = lock(&self.inbox);
            if inbox.pauses > 0 || inbox.closed.is_some() {
                return None;
            }
            (
                std::mem::take(&mut inbox.added),
                std::mem::take(&mut inbox.aborted),
            )
        };
        let mut core = lock(&self.core);
        let mut masks = lock(&self.masks);
        for (request, grammar) in added {
            let id = request.id;
            match (core.add(request), grammar) {
                (Ok(()), Some(grammar)) => masks.insert(id, grammar),
                (Ok(()), None) => {}
                (Err(error), _) => {
                    lock(&self.collector).end(id, &Finish::Error, Some(error.to_string()))
                }
            }
        }
        for (id, choice) in aborted {
            match choice {
                None => drop(core.abort(id)),
                Some(choice) => drop(core.abort_choice(id, choice)),
            }
        }
        let step = core.schedule(plan);
        if let Some(step) = step {
            masks.begin(&core, step);
            self.note(&core);
            let num_decode_rows = plan[header::NUM_DECODE_ROWS].cast_unsigned();
            if let Some(batch) = core.newest_batch(num_decode_rows) {
                lock(&self.steps).scheduled(step, batch);
            }
        }
        if core.has_ended() {
            let mut collector = lock(&self.collector);
            let mut ended = Vec::new();
            core.take_ended(&mut |output: Output<'_>| {
                deliver(&mut collector, &output, 1, Extras::default());
                ended.push((output.id, output.choice));
            });
            for (id, choice) in ended {
                masks.remove(id, choice, &core);
            }
        }
        step
    }

    /// The masks of a step in flight, `[num_rows * ceil(V / 32)]`: bit `i % 32` of a row's word `i / 32` allows token `i`. Waits for those
    /// that are being made, with nothing locked.
    pub fn masks(&self, step: StepId, num_rows: usize) -> Vec<i32> {
        let collection = lock(&self.masks).take(step);
        collection.collect(num_rows)
    }

    /// Settles a step: tokens become known, finished requests let go of their blocks, news goes out.
    ///
    /// # Errors
    /// The results are not those of the oldest step in flight; nothing was changed.
    pub fn commit(&self, results: StepResults<'_>, extras: Extras<'_>) -> Result<(), EngineError> {
        let rows = results.num_sampled.len();
        let positions = results.tokens.len() / rows.max(1);
        let has_row = |part: &Pooled<'_>| (part.row as usize) < rows;
        let scores = extras.logprobs;
        let whole = scores.is_none_or(|scores| scores.covers(rows * positions))
            && extras.pooled.iter().all(has_row)
            && extras.prompt_logprobs.iter().all(|part| {
                (part.row as usize) < rows && part.scores.covers(part.scores.ranks.len())
            });
        if !whole {
            return Err(EngineError::Scores(results.step_id));
        }
        let mut core = lock(&self.core);
        let mut masks = lock(&self.masks);
        let mut collector = lock(&self.collector);
        let mut stopped: Vec<(RequestId, u32)> = Vec::new();
        let mut ended: Vec<(RequestId, u32)> = Vec::new();
        core.commit(&results, &mut |output: Output<'_>| {
            if output.finish.is_some() {
                ended.push((output.id, output.choice));
            }
            if deliver(&mut collector, &output, positions, extras) {
                stopped.push((output.id, output.choice));
            }
            if output.finish == Some(FinishReason::Error)
                && let Some(reason) = masks.error(output.id, output.choice)
            {
                collector.explain(output.id, &format!("its grammar allows no token: {reason}"));
            }
        })?;
        for (id, choice) in ended {
            masks.remove(id, choice, &core);
        }
        for (id, choice) in stopped {
            core.abort_choice(id, choice);
        }
        masks.begin(&core, core.last_scheduled());
        self.note(&core);
        lock(&self.steps).committed(results.step_id);
        Ok(())
    }

    /// Writes the journal, if there is one.
    fn note(&self, core: &Core) {
        if let Some(journal) = self.journal.get() {
            lock(journal).write(core);
        }
    }
}

/// Hands one output to the collector. True if a stop string ended the choice before the core did.
fn deliver(
    collector: &mut Collector,
    output: &Output<'_>,
    positions: usize,
    extras: Extras<'_>,
) -> bool {
    let is_own = |part: &&Pooled<'_>| Some(part.row) == output.row;
    if let Some(found) = extras.pooled.iter().find(is_own) {
        collector.set_pooled(output.id, found.vector);
    }
    let span = output.prompt_logprobs;
    if let Some(found) = extras
        .prompt_logprobs
        .iter()
        .find(|p| !span.is_empty() && Some(p.row) == output.row)
    {
        let top = collector.num_prompt_logprobs(output.id);
        let scores = (0..found.scores.ranks.len())
            .map(|i| found.scores.position(i, top))
            .collect();
        collector.push_prompt_logprobs(output.id, found.start, scores);
    }
    collector.set_num_cached_tokens(output.id, output.choice, output.num_cached_tokens);
    if output.finish == Some(FinishReason::Error) {
        collector.explain(output.id, "the model gave no token that can be drawn: its logits are not finite, or all are masked");
    }
    let scores = match (
        extras.logprobs,
        output.row,
        collector.num_logprobs(output.id),
    ) {
        (Some(logprobs), Some(row), Some(top)) => {
            let first = row as usize * positions;
            (first..first + output.tokens.len())
                .map(|i| logprobs.position(i, top))
                .collect()
        }
        _ => Vec::new(),
    };
    let finish = output.finish.map(|reason| match reason {
        FinishReason::Eos(_) => Finish::EndOfSequence,
        FinishReason::Stop(token) => Finish::StopToken(token),
        FinishReason::Length => Finish::Length,
        FinishReason::Abort => Finish::Abort,
        FinishReason::Error => Finish::Error,
    });
    let new = NewTokens {
        tokens: output.tokens.to_vec(),
        logprobs: scores,
        finish,
    };
    collector.push(output.id, output.choice, new)
}

impl StepLogprobs<'_> {
    /// Whether there are scores for exactly `positions` positions.
    fn covers(&self, positions: usize) -> bool {
        let entries = positions * self.width;
        self.width > 0
            && self.ranks.len() == positions
            && self.ids.len() == entries
            && self.values.len() == entries
    }

    /// One position, its own token and the `top` likeliest.
    fn position(&self, index: usize, top: usize) -> PositionLogprobs {
        let first = index * self.width;
        let kept = first..first + self.width.min(1 + top);
        PositionLogprobs {
            ids: self.ids[kept.clone()]
                .iter()
                .map(|&id| id.cast_unsigned())
                .collect(),
            values: self.values[kept]
                .iter()
                .map(|value| value.max(LOWEST_LOGPROB))
                .collect(),
            rank: self.ranks[index].cast_unsigned(),
        }
    }
}
