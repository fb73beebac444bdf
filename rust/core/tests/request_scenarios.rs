//! What a request gets, when it ends, and what is refused: one sentence a test.
#![allow(clippy::unwrap_used)]

mod common;

use common::engine::{Engine, alone, config, params, prompt, request};
use common::make_seed;
use octavo_core::config::{CacheGroup, ConfigError, CoreConfig};
use octavo_core::ids::{RequestId, StepId};
use octavo_core::output::{CommitError, FinishReason, Output, StepResults};
use octavo_core::params::{Limits, Pooling, SamplingParams};
use octavo_core::plan::{SLOT_INIT_HEADER_WORDS, flags, header};
use octavo_core::request::{AddError, AddRequest};
use octavo_core::scheduler::Core;

#[test]
fn a_stop_inside_an_accepted_run_cuts_what_follows() {
    let config = CoreConfig {
        max_draft_tokens: 4,
        ..config()
    };
    let (all, _) = alone(&config, &request(1, &prompt(1, 6), 40), 0);
    let mut cut_inside = 0;
    for &last in &all[2..30] {
        let mut stopping = request(1, &prompt(1, 6), 40);
        stopping.params.stop_token_ids = vec![last];
        let wanted = alone(&config, &stopping, 0);
        let mut engine = Engine::new(config.clone());
        engine.add(stopping);
        while engine.core.has_work() {
            engine.schedule();
            let accepted = engine.in_flight[0].num_sampled[0] as usize;
            let before = engine.told.get(&(1, 0)).map_or(0, |told| told.tokens.len());
            engine.commit();
            cut_inside += usize::from(engine.told(1).tokens.len() < before + accepted);
        }
        assert_eq!(
            (engine.told(1).tokens.clone(), engine.told(1).finish),
            (wanted.0, Some(wanted.1))
        );
    }
    assert!(
        cut_inside > 5,
        "stops came inside an accepted run {cut_inside} times only"
    );
}

#[test]
fn a_stop_at_the_last_token_of_the_budget_wins_over_length() {
    let (all, _) = alone(&config(), &request(1, &prompt(1, 6), 8), 0);
    for (max_tokens, finish) in [(8, FinishReason::Stop(all[7])), (7, FinishReason::Length)] {
        let mut engine = Engine::new(config());
        let mut stopping = request(1, &prompt(1, 6), max_tokens);
        stopping.params.stop_token_ids = vec![all[7]];
        engine.add(stopping);
        engine.run();
        assert_eq!(engine.told(1).finish, Some(finish));
    }
}

#[test]
fn stop_ids_of_the_user_count_under_ignore_eos_and_those_of_the_model_do_not() {
    let (all, _) = alone(&config(), &request(1, &prompt(1, 6), 20), 0);
    let mut engine = Engine::new(config());
    let mut stopping = request(1, &prompt(1, 6), 20);
    stopping.params.eos_token_ids = vec![all[2], all[4]];
    let mut ignoring = AddRequest {
        id: RequestId(2),
        ..stopping.clone()
    };
    ignoring.params.ignore_eos = true;
    let mut both = AddRequest {
        id: RequestId(3),
        ..ignoring.clone()
    };
    both.params.stop_token_ids = vec![all[5]];
    for request in [stopping, ignoring, both] {
        engine.add(request);
    }
    engine.run();
    assert_eq!(engine.told(1).finish, Some(FinishReason::Eos(all[2])));
    assert_eq!(
        (engine.told(2).finish, engine.told(2).tokens.len()),
        (Some(FinishReason::Length), 20)
    );
    assert_eq!(engine.told(3).finish, Some(FinishReason::Stop(all[5])));
}

#[test]
fn nothing_stops_before_min_tokens_and_the_prompt_does_not_count() {
    let (all, _) = alone(&config(), &request(1, &prompt(1, 40), 20), 0);
    let mut engine = Engine::new(config());
    let mut stopping = request(1, &prompt(1, 40), 20);
    stopping.params.min_tokens = 8;
    stopping.params.eos_token_ids = all[..10].to_vec();
    engine.add(stopping);
    engine.schedule();
    assert_ne!(
        engine.in_flight[0].rows[0].flags & flags::BIAS,
        0,
        "a pending min_tokens bans the stop ids"
    );
    engine.commit();
    engine.run();
    assert_eq!(
        (engine.told(1).tokens.len(), engine.told(1).finish),
        (9, Some(FinishReason::Eos(all[8])))
    );
}

#[test]
fn no_row_is_scheduled_for_tokens_that_are_in_flight_already() {
    let mut engine = Engine::new(CoreConfig {
        max_in_flight: 3,
        ..config()
    });
    engine.add(request(1, &prompt(1, 6), 2));
    assert!(engine.schedule().is_some() && engine.schedule().is_some());
    assert_eq!(engine.schedule(), None);
    engine.run();
    assert_eq!(engine.told(1).tokens.len(), 2);
}

#[test]
fn choices_wait_for_the_prompt_and_then_share_its_blocks() {
    for enable_prefix_caching in [true, false] {
        let config = CoreConfig {
            enable_prefix_caching,
            ..config()
        };
        let mut engine = Engine::new(config.clone());
        let many = AddRequest {
            params: SamplingParams { n: 4, ..params(6) },
            ..request(1, &prompt(1, 70), 6)
        };
        engine.add(many.clone());
        assert_eq!(
            engine.step(),
            [64],
            "the others wait while the prompt is not scheduled"
        );
        assert_eq!(engine.step(), [6, 2, 2, 2]);
        let tables: Vec<Vec<u32>> = (0..4)
            .map(|slot| engine.device.table(slot).to_vec())
            .collect();
        for table in &tables[1..] {
            assert_eq!(table[..17], tables[0][..17]);
            assert_ne!(table[17], tables[0][17]);
        }
        engine.run();
        for choice in 0..4 {
            assert_eq!(
                engine.told[&(1, choice)].tokens,
                alone(&config, &many, choice).0
            );
        }
    }
}

#[test]
fn a_choice_takes_over_the_prompt_if_the_first_is_aborted() {
    let mut engine = Engine::new(config());
    engine.add(AddRequest {
        params: SamplingParams { n: 3, ..params(6) },
        ..request(1, &prompt(1, 70), 6)
    });
    engine.schedule();
    assert!(engine.core.abort_choice(RequestId(1), 0));
    assert!(!engine.core.abort_choice(RequestId(1), 0));
    engine.commit();
    engine.run();
    assert_eq!(engine.told(1).finish, Some(FinishReason::Abort));
    assert_eq!(
        (
            engine.told[&(1, 1)].tokens.len(),
            engine.told[&(1, 2)].tokens.len()
        ),
        (6, 6)
    );
}

#[test]
fn prompt_logprobs_skip_the_look_up_and_still_insert() {
    let mut engine = Engine::new(config());
    engine.add(request(1, &prompt(1, 20), 1));
    engine.run();
    let asking = SamplingParams {
        prompt_logprobs: Some(1),
        ..params(1)
    };
    engine.add(AddRequest {
        params: asking.clone(),
        ..request(2, &prompt(1, 20), 1)
    });
    assert_eq!(engine.step(), [20]);
    engine.add(AddRequest {
        params: asking,
        ..request(3, &prompt(3, 20), 1)
    });
    engine.run();
    engine.add(request(4, &prompt(3, 20), 1));
    engine.run();
    assert_eq!(
        (
            engine.told(2).num_cached_tokens,
            engine.told(4).num_cached_tokens
        ),
        (0, 16)
    );
}

#[test]
fn a_mean_takes_nothing_from_the_cache_and_a_last_state_does_and_both_insert() {
    let mut engine = Engine::new(config());
    let pooled = |id: u64, number: u32, pooling: Pooling| AddRequest {
        params: SamplingParams {
            pooling: Some(pooling),
            ..params(1)
        },
        ..request(id, &prompt(number, 20), 1)
    };
    engine.add(pooled(1, 1, Pooling::Mean));
    assert_eq!(engine.step(), [20]);
    engine.add(pooled(2, 1, Pooling::Mean));
    assert_eq!(engine.step(), [20], "all of it is computed again");
    engine.add(pooled(3, 1, Pooling::Last));
    assert_eq!(engine.step(), [4]);
    let cached = [1, 2, 3].map(|id| engine.told(id).num_cached_tokens);
    assert_eq!(cached, [0, 0, 16]);
}

#[test]
fn a_prompt_that_becomes_a_vector_has_one_choice_and_one_token() {
    let valid = SamplingParams {
        pooling: Some(Pooling::Last),
        ..params(1)
    };
    let check = |params: SamplingParams| params.validate(1000, &Limits::default());
    assert_eq!(check(valid.clone()), Ok(()));
    assert!(
        check(SamplingParams {
            n: 2,
            ..valid.clone()
        })
        .is_err()
    );
    assert!(
        check(SamplingParams {
            max_tokens: 2,
            ..valid
        })
        .is_err()
    );
}

#[test]
fn a_request_the_device_cannot_compute_fails_alone() {
    let mut engine = Engine::new(CoreConfig {
        max_in_flight: 2,
        ..config()
    });
    let failing = SamplingParams {
        seed: make_seed(0, 3, 1),
        ..params(10)
    };
    engine.add(AddRequest {
        params: failing,
        ..request(1, &prompt(1, 6), 10)
    });
    engine.add(request(2, &prompt(2, 6), 10));
    engine.run();
    assert_eq!(
        (engine.told(1).tokens.len(), engine.told(1).finish),
        (2, Some(FinishReason::Error))
    );
    assert_eq!(
        (engine.told(2).tokens.len(), engine.told(2).finish),
        (10, Some(FinishReason::Length))
    );
}

#[test]
fn a_request_that_can_never_run_is_refused_with_the_reason() {
    let mut core = Core::new(CoreConfig {
        num_blocks: 11,
        ..config()
    })
    .unwrap();
    let tried = |core: &mut Core, request: AddRequest| core.add(request).unwrap_err();
    assert_eq!(tried(&mut core, request(1, &[], 1)), AddError::EmptyPrompt);
    assert!(matches!(
        tried(&mut core, request(1, &prompt(1, 41), 1)),
        AddError::PoolTooSmall {
            needed: 11,
            num_blocks: 10,
            ..
        }
    ));
    assert!(matches!(
        tried(&mut core, request(1, &prompt(1, 200), 1)),
        AddError::ContextLengthExceeded { .. }
    ));
    assert!(matches!(
        tried(&mut core, request(1, &[5, 1000], 1)),
        AddError::OutOfVocabulary { position: 1, .. }
    ));
    assert_eq!(
        tried(&mut core, request(1, &[5], 0)),
        AddError::Zero("max_tokens")
    );
    let long = SamplingParams {
        bad_words: vec![vec![1; 7000]],
        ..params(1)
    };
    let long = AddRequest {
        params: long,
        ..request(1, &[5], 1)
    };
    assert!(matches!(
        tried(&mut core, long),
        AddError::ListsTooLong { words: 7001, .. }
    ));
    core.add(request(1, &prompt(1, 40), 1)).unwrap();
    assert!(matches!(
        tried(&mut core, request(1, &[5], 1)),
        AddError::Duplicate { choice: 0, .. }
    ));
    core.check_integrity().unwrap();
}

#[test]
fn results_that_do_not_belong_to_the_step_change_nothing() {
    let mut engine = Engine::new(config());
    engine.add(request(1, &prompt(1, 6), 3));
    engine.schedule();
    let good = StepResults {
        step_id: StepId(1),
        tokens: &[5],
        num_sampled: &[1],
        next_drafts: None,
    };
    let bad = [
        StepResults {
            step_id: StepId(2),
            ..good
        },
        StepResults {
            tokens: &[5, 6],
            ..good
        },
        StepResults {
            num_sampled: &[2],
            ..good
        },
        StepResults {
            num_sampled: &[0],
            ..good
        },
        StepResults {
            tokens: &[1000],
            ..good
        },
    ];
    for results in bad {
        let error = engine.core.commit(&results, &mut |_: Output<'_>| {
            panic!("an output of {results:?}")
        });
        assert!(error.is_err());
        assert_eq!(engine.core.num_in_flight(), 1);
    }
    engine.commit();
    let error = engine
        .core
        .commit(&good, &mut |_: Output<'_>| ())
        .unwrap_err();
    assert_eq!(error, CommitError::NothingInFlight(StepId(1)));
}

#[test]
fn a_slot_init_entry_holds_all_parameters_and_lists_in_the_order_of_the_contract() {
    let mut engine = Engine::new(config());
    let params = SamplingParams {
        seed: 0x1234_5678_9abc_def0,
        temperature: 0.7,
        top_k: 40,
        top_p: 0.9,
        min_p: 0.05,
        presence_penalty: 0.1,
        frequency_penalty: 0.2,
        repetition_penalty: 1.3,
        max_tokens: 9,
        min_tokens: 2,
        stop_token_ids: vec![8, 3],
        eos_token_ids: vec![2],
        logprobs: Some(5),
        logit_bias: vec![(4, -1.5), (6, 2.0)],
        bad_words: vec![vec![10, 11], vec![12]],
        allowed_token_ids: vec![20, 21, 22],
        ..SamplingParams::default()
    };
    let resumed = AddRequest {
        first_choice: 6,
        num_prompt_tokens: 2,
        ..AddRequest::new(RequestId(1), vec![30, 31, 32], params)
    };
    engine.add(resumed);
    engine.schedule();
    let plan = &engine.buffer;
    assert_eq!(plan[header::NUM_SLOT_INITS], 1);
    let at = plan[header::SLOT_INITS_OFFSET] as usize;
    let float = |value: f32| value.to_bits() as i32;
    let param_flags =
        flags::LOGPROBS | flags::PENALTIES | flags::RANDOM | flags::FILTER | flags::BIAS;
    let expected = [
        41,
        0,
        2,
        3,
        6,
        0x9abc_def0_u32 as i32,
        0x1234_5678,
        float(0.7),
        float(0.9),
        float(0.05),
        float(0.1),
        float(0.2),
        float(1.3),
        40,
        2,
        9,
        5,
        -1,
        param_flags,
        2,
        3,
        2,
        3, // header
        4,
        float(-1.5),
        6,
        float(2.0),
        2,
        3,
        8,
        2,
        10,
        11,
        1,
        12,
        20,
        21,
        22,
        30,
        31,
        32,
    ];
    assert_eq!(plan[at..plan[header::USED_WORDS] as usize], expected);
    assert_eq!(engine.in_flight[0].rows[0].flags & param_flags, param_flags);
}

#[test]
fn an_end_of_sequence_id_that_the_model_does_not_have_is_never_sent_to_the_device() {
    let mut engine = Engine::new(config());
    engine.add(AddRequest {
        params: SamplingParams {
            min_tokens: 1,
            eos_token_ids: vec![1000, 2, 4000],
            ..params(4)
        },
        ..request(1, &prompt(1, 5), 4)
    });
    engine.schedule();
    let entry = engine.buffer[header::SLOT_INITS_OFFSET] as usize;
    let (num_stops, first_list) = (entry + 20, entry + SLOT_INIT_HEADER_WORDS);
    assert_eq!(engine.buffer[num_stops], 1);
    assert_eq!(engine.buffer[first_list], 2);
}

#[test]
fn an_unusable_configuration_is_refused_by_the_name_of_its_field() {
    let error = |config: CoreConfig| Core::new(config).unwrap_err();
    let zero = error(CoreConfig {
        max_num_seqs: 0,
        ..config()
    });
    assert!(matches!(
        zero,
        ConfigError::OutOfRange {
            field: "max_num_seqs",
            value: 0,
            ..
        }
    ));
    assert!(zero.to_string().starts_with("max_num_seqs = 0"));
    assert_eq!(
        error(CoreConfig {
            watermark: 1.0,
            ..config()
        }),
        ConfigError::Watermark(1.0)
    );
    const WINDOW: CacheGroup = CacheGroup::Window { window: 8 };
    let none = CacheGroup::Window { window: 0 };
    for (groups, index) in [
        (vec![], 0),
        (vec![WINDOW], 0),
        (vec![CacheGroup::Full, WINDOW, CacheGroup::Full], 2),
        (vec![CacheGroup::Full, none], 1),
    ] {
        let given = groups.get(index).copied();
        let config = CoreConfig { groups, ..config() };
        assert_eq!(error(config), ConfigError::Group { index, given });
    }
    let drafts = CoreConfig {
        max_draft_tokens: 2,
        max_in_flight: 2,
        host_state: true,
        ..config()
    };
    assert!(matches!(
        error(drafts),
        ConfigError::HostStateWithDrafts { .. }
    ));
}
