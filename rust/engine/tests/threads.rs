//! The engine's contract with its threads: who is told what, and when, with a loop that draws the same token for ever.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use octavo_core::config::CoreConfig;
use octavo_core::ids::{Namespace, RequestId, TenantId};
use octavo_core::output::StepResults;
use octavo_core::params::{Limits, SamplingParams};
use octavo_core::plan::{Layout, flags, header};
use octavo_engine::engine::{Engine, EngineError, Extras, Submission};
use octavo_engine::journal::Journal;
use octavo_engine::mailbox::Mailbox;
use octavo_engine::update::{Finish, Update};
use octavo_text::output::TextOptions;

const TOKEN: i32 = 7;
const LONG: Duration = Duration::from_secs(60);

fn config() -> CoreConfig {
    CoreConfig {
        block_size: 4,
        num_blocks: 65,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: 200,
        vocab_size: 100,
        ..CoreConfig::default()
    }
}

fn engine() -> Arc<Engine> {
    Arc::new(Engine::new(config(), Limits::default(), None, Vec::new()).unwrap())
}

fn submission(prompt: &[u32], max_tokens: u32, stream: bool) -> Submission {
    Submission {
        tokens: prompt.to_vec(),
        num_prompt_tokens: prompt.len() as u32,
        first_choice: 0,
        params: SamplingParams {
            max_tokens,
            ..SamplingParams::default()
        },
        detokenize: false,
        text: TextOptions::default(),
        priority: 0,
        tenant: TenantId(0),
        namespace: Namespace(0),
        stream,
        grammar: None,
    }
}

/// One step; false if there was none. A row fails if `fails` says so of its slot.
fn step(engine: &Engine, fails: impl Fn(i32) -> bool) -> bool {
    let layout = Layout::new(engine.config());
    let mut plan = vec![0; layout.total_words];
    let Some(step_id) = engine.schedule(&mut plan) else {
        return false;
    };
    let rows = plan[header::NUM_ROWS] as usize;
    let num_sampled: Vec<i32> = (0..rows)
        .map(|row| match plan[layout.flags + row] & flags::SAMPLE {
            0 => 0,
            _ if fails(plan[layout.slot + row]) => -1,
            _ => 1,
        })
        .collect();
    let results = StepResults {
        step_id,
        tokens: &vec![TOKEN; rows],
        num_sampled: &num_sampled,
        next_drafts: None,
    };
    engine.commit(results, Extras::default()).unwrap();
    true
}

fn run_to_the_end(engine: &Engine) {
    while step(engine, |_| false) {}
}

/// The engine's loop on a thread of its own; `busy` is true while a step is in flight.
fn spawn_loop(engine: &Arc<Engine>, busy: &Arc<AtomicBool>) -> thread::JoinHandle<()> {
    let (engine, busy) = (Arc::clone(engine), Arc::clone(busy));
    thread::spawn(move || {
        while !engine.is_shut_down() {
            busy.store(true, Ordering::SeqCst);
            let stepped = step(&engine, |_| false);
            busy.store(false, Ordering::SeqCst);
            if !stepped {
                engine.wait();
            }
        }
    })
}

fn receive_one(engine: &Engine, mailbox: &Mailbox) -> Update {
    let mut updates = engine.receive(mailbox, LONG);
    assert_eq!(updates.len(), 1);
    updates.remove(0)
}

#[test]
fn a_reader_that_comes_late_gets_one_update_with_everything() {
    let (engine, mailbox) = (engine(), Arc::new(Mailbox::default()));
    let id = engine
        .add(submission(&[1, 2, 3], 5, true), &mailbox)
        .unwrap();
    run_to_the_end(&engine);
    let update = receive_one(&engine, &mailbox);
    assert_eq!((update.id, update.finished), (id, true));
    assert_eq!(update.choices[0].token_ids, [TOKEN as u32; 5]);
    assert_eq!(update.choices[0].finish, Some(Finish::Length));
    assert_eq!(engine.num_unfetched(), 0);
}

#[test]
fn a_stream_is_told_each_step_and_others_their_end_alone() {
    for (stream, expected) in [(true, vec![1, 1, 1]), (false, vec![3])] {
        let (engine, mailbox) = (engine(), Arc::new(Mailbox::default()));
        engine
            .add(submission(&[1, 2, 3], 3, stream), &mailbox)
            .unwrap();
        let mut lengths = Vec::new();
        while step(&engine, |_| false) {
            let updates = engine.receive(&mailbox, Duration::ZERO);
            lengths.extend(
                updates
                    .iter()
                    .map(|update| update.choices[0].token_ids.len()),
            );
        }
        assert_eq!(lengths, expected);
    }
}

#[test]
fn an_abort_is_told_at_once_and_its_blocks_come_back_with_the_next_schedule() {
    let (engine, mailbox) = (engine(), Arc::new(Mailbox::default()));
    let id = engine
        .add(submission(&[1, 2, 3], 50, false), &mailbox)
        .unwrap();
    assert!(step(&engine, |_| false));
    engine.abort(id);
    let update = receive_one(&engine, &mailbox);
    assert_eq!(update.choices[0].finish, Some(Finish::Abort));
    assert_eq!(update.choices[0].token_ids, [TOKEN as u32]);
    assert!(!step(&engine, |_| false));
    assert_eq!(engine.stats().num_running, 0);
    assert!(engine.receive(&mailbox, Duration::ZERO).is_empty());
    engine.check_integrity().unwrap();
}

#[test]
fn a_request_aborted_before_any_step_never_runs() {
    let (engine, mailbox) = (engine(), Arc::new(Mailbox::default()));
    let id = engine
        .add(submission(&[1, 2, 3], 50, true), &mailbox)
        .unwrap();
    engine.abort(id);
    assert!(!step(&engine, |_| false));
    assert!(receive_one(&engine, &mailbox).finished);
    assert_eq!((engine.stats().num_waiting, engine.num_unfetched()), (0, 0));
}

#[test]
fn a_failed_row_ends_its_request_and_no_other() {
    let (engine, mailbox) = (engine(), Arc::new(Mailbox::default()));
    for number in 0..3 {
        engine
            .add(submission(&[number, 2, 3], 4, false), &mailbox)
            .unwrap();
    }
    assert!(step(&engine, |slot| slot == 1));
    run_to_the_end(&engine);
    let mut finishes: Vec<_> = engine
        .receive(&mailbox, Duration::ZERO)
        .into_iter()
        .map(|mut update| {
            let choice = update.choices.remove(0);
            (choice.token_ids.len(), choice.finish.unwrap().reason())
        })
        .collect();
    finishes.sort_unstable();
    assert_eq!(finishes, [(0, "error"), (4, "length"), (4, "length")]);
    engine.check_integrity().unwrap();
}

#[test]
fn a_pause_returns_with_no_step_in_flight_and_none_starts_before_the_last_resume() {
    let (engine, mailbox) = (engine(), Arc::new(Mailbox::default()));
    let busy = Arc::new(AtomicBool::new(false));
    let running = spawn_loop(&engine, &busy);
    for round in 0..200 {
        engine
            .add(submission(&[round % 100, 2, 3], 20, false), &mailbox)
            .unwrap();
        engine.pause();
        engine.pause();
        let tokens = engine.stats().generation_tokens;
        engine.resume();
        assert_eq!(
            engine.schedule(&mut vec![0; Layout::new(engine.config()).total_words]),
            None
        );
        assert!(!busy.load(Ordering::SeqCst));
        assert_eq!(engine.stats().generation_tokens, tokens);
        engine.resume();
    }
    let mut finished = 0;
    while finished < 200 {
        finished += engine.receive(&mailbox, LONG).len();
    }
    engine.shut_down();
    running.join().unwrap();
}

#[test]
fn no_wake_up_is_lost_between_many_callers_and_the_loop() {
    let engine = engine();
    let running = spawn_loop(&engine, &Arc::default());
    let callers: Vec<_> = (0..8)
        .map(|caller| {
            let engine = Arc::clone(&engine);
            thread::spawn(move || {
                let mailbox = Arc::new(Mailbox::default());
                for round in 0..100 {
                    let id = engine
                        .add(submission(&[caller, round, 3], 3, round % 2 == 0), &mailbox)
                        .unwrap();
                    if round % 3 == 0 {
                        engine.abort(id);
                    }
                    while !receive_one(&engine, &mailbox).finished {}
                }
            })
        })
        .collect();
    callers
        .into_iter()
        .for_each(|caller| caller.join().unwrap());
    engine.shut_down();
    running.join().unwrap();
    assert_eq!(engine.num_unfetched(), 0);
    engine.check_integrity().unwrap();
}

#[test]
fn a_failure_is_told_to_every_request_and_later_ones_are_refused() {
    let (engine, mailbox) = (engine(), Arc::new(Mailbox::default()));
    let running = engine
        .add(submission(&[1, 2, 3], 50, false), &mailbox)
        .unwrap();
    assert!(step(&engine, |_| false));
    let waiting = engine
        .add(submission(&[4, 5], 50, false), &mailbox)
        .unwrap();
    engine.fail("the device is gone");
    let mut told: Vec<_> = engine
        .receive(&mailbox, Duration::ZERO)
        .into_iter()
        .map(|update| (update.id, update.error, update.finished))
        .collect();
    told.sort_unstable();
    let error = || Some("the device is gone".to_owned());
    assert_eq!(told, [(running, error(), true), (waiting, error(), true)]);
    let refused = engine.add(submission(&[6], 1, false), &mailbox);
    assert!(
        matches!(refused, Err(EngineError::ShutDown(reason)) if reason == "the device is gone")
    );
    engine.pause();
    engine.wait();
    assert!(!step(&engine, |_| false));
}

#[test]
fn a_choice_that_goes_on_keeps_its_number_and_its_count() {
    let (engine, mailbox) = (engine(), Arc::new(Mailbox::default()));
    let going_on = Submission {
        num_prompt_tokens: 2,
        first_choice: 3,
        ..submission(&[1, 2, 9, 9], 5, true)
    };
    engine.add_as(RequestId(77), going_on, &mailbox).unwrap();
    run_to_the_end(&engine);
    let update = receive_one(&engine, &mailbox);
    assert_eq!(update.id, RequestId(77));
    assert_eq!(update.choices[0].index, 3);
    assert_eq!(
        update.choices[0].token_ids, [TOKEN as u32; 3],
        "two of five were there"
    );
    assert_eq!(update.choices[0].finish, Some(Finish::Length));
}

#[test]
fn one_choice_of_many_can_be_withdrawn() {
    let (engine, mailbox) = (engine(), Arc::new(Mailbox::default()));
    let mut two = submission(&[1, 2, 3], 5, true);
    two.params.n = 2;
    let id = engine.add(two, &mailbox).unwrap();
    assert!(step(&engine, |_| false));
    engine.abort_choice(id, 1);
    engine.abort_choice(id, 9);
    run_to_the_end(&engine);
    let update = receive_one(&engine, &mailbox);
    let ends: Vec<_> = update
        .choices
        .iter()
        .map(|choice| (choice.index, choice.token_ids.len(), choice.finish.clone()))
        .collect();
    assert_eq!(ends[0], (0, 5, Some(Finish::Length)));
    assert_eq!((ends[1].0, ends[1].2.clone()), (1, Some(Finish::Abort)));
    assert!(update.finished);
    engine.check_integrity().unwrap();
}

#[test]
fn the_journal_names_the_requests_in_flight_and_nobody_after_their_commit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let (engine, mailbox) = (engine(), Arc::new(Mailbox::default()));
    engine.keep_journal(Journal::create(&path).unwrap());
    let written = || octavo_wire::journal::decode(&std::fs::read(&path).unwrap());
    for id in [5, 4] {
        let request = submission(&[1, 2, 3], 2, true);
        engine.add_as(RequestId(id), request, &mailbox).unwrap();
    }
    assert_eq!(written(), None);
    let layout = Layout::new(engine.config());
    let mut plan = vec![0; layout.total_words];
    let step_id = engine.schedule(&mut plan).unwrap();
    let journal = written().unwrap();
    assert_eq!((journal.step, journal.requests), (step_id.0, vec![4, 5]));
    let results = StepResults {
        step_id,
        tokens: &[TOKEN; 2],
        num_sampled: &[1; 2],
        next_drafts: None,
    };
    engine.commit(results, Extras::default()).unwrap();
    assert_eq!(written().unwrap().requests, [0; 0]);
}
