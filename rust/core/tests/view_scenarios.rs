//! What an onlooker sees of the pool, the tree and a step, against the tables that the device was given.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashMap;

use common::engine::{Engine, config, prompt, request};
use octavo_core::config::{CacheGroup, CoreConfig};
use octavo_core::plan::header;
use octavo_core::view::{BlockState, BlockView, StepBatch};

fn view(engine: &Engine) -> Vec<BlockView> {
    let mut blocks = Vec::new();
    let all = engine.core.config().num_blocks;
    // In two slices, and further than there are blocks.
    engine.core.view_blocks(0..all / 3, &mut blocks);
    engine.core.view_blocks(all / 3..all + 7, &mut blocks);
    assert_eq!(blocks.len() as u32, all);
    blocks
}

fn batch(engine: &Engine) -> StepBatch {
    let decodes = engine.buffer[header::NUM_DECODE_ROWS].cast_unsigned();
    engine.core.newest_batch(decodes).unwrap()
}

#[test]
fn a_block_is_private_shared_cached_or_free_as_the_tables_of_the_device_say() {
    let mut engine = Engine::new(config());
    engine.add(request(1, &prompt(1, 9), 2));
    engine.run();
    for id in 2..4 {
        engine.add(request(id, &prompt(2, 14), 3));
    }
    engine.schedule();
    let mut holders: HashMap<u32, u32> = HashMap::new();
    for slot in 0..2 {
        for &block in engine.device.table(slot) {
            *holders.entry(block).or_default() += 1;
        }
    }
    let seen = view(&engine);
    let stats = engine.core.stats();
    let count = |state| seen.iter().filter(|block| block.state == state).count() as u32;
    for (id, block) in (0..).zip(&seen) {
        match holders.get(&id) {
            None => assert!(matches!(block.state, BlockState::Free | BlockState::Cached)),
            Some(1) => assert_eq!(block.state, BlockState::Private, "block {id}"),
            Some(_) => assert_eq!(block.state, BlockState::Shared, "block {id}"),
        }
    }
    // The null block is never held.
    assert_eq!(count(BlockState::Free), stats.free_blocks + 1);
    assert_eq!(count(BlockState::Cached), stats.evictable_blocks);
    assert_eq!(count(BlockState::Cached), 2, "two full blocks of the first");
    assert_eq!(count(BlockState::Shared), 3);
    let nodes = seen.iter().filter(|block| block.parent.is_some()).count();
    assert_eq!(nodes as u32, stats.cached_blocks);
    // The path of the common prompt, last block first.
    let table = engine.device.table(0).to_vec();
    for pair in table[..3].windows(2) {
        assert_eq!(seen[pair[1] as usize].parent.unwrap().0, pair[0]);
    }
    assert_eq!(seen[table[0] as usize].parent.unwrap().0, 0);
}

#[test]
fn a_step_tells_prefill_from_decode_and_counts_the_keys_that_it_reads() {
    let mut engine = Engine::new(CoreConfig {
        groups: vec![CacheGroup::Full, CacheGroup::Window { window: 6 }],
        ..config()
    });
    engine.add(request(1, &prompt(1, 10), 5));
    engine.schedule();
    let whole = StepBatch {
        prefill_rows: 1,
        prefill_tokens: 10,
        kv_tokens: 10 + 10,
        ..StepBatch::default()
    };
    assert_eq!(batch(&engine), whole);
    engine.commit();
    assert_eq!(engine.core.newest_batch(0), None, "no step is in flight");
    engine.add(request(2, &prompt(2, 3), 5));
    engine.schedule();
    let mixed = StepBatch {
        decode_rows: 1,
        decode_tokens: 1,
        prefill_rows: 1,
        prefill_tokens: 3,
        kv_tokens: (11 + 6) + (3 + 3),
    };
    assert_eq!(batch(&engine), mixed);
}
