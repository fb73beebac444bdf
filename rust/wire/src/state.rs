//! What an engine shows of itself to people: a picture of one moment, made without holding a step up.

use octavo_core::stats::Stats;
use serde::{Deserialize, Serialize};

/// A picture of the engine. Counts are of one moment; the map is read in slices, each of a moment of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineState {
    /// Microseconds since the engine was made.
    pub now_us: u64,
    /// Counters of the control plane.
    pub stats: Stats,
    /// Tokens of a block.
    pub block_size: u32,
    /// Bytes of a block.
    pub bytes_per_block: u64,
    /// The latest committed steps, oldest first.
    pub steps: Vec<StepRecord>,
    /// The block pool.
    pub map: PoolMap,
    /// The radix tree of cached prefixes.
    pub tree: TreeView,
    /// Microseconds for which the control plane was held to make this, the longest time and all together.
    pub held_us: (f64, f64),
}

/// One committed step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Number of the step.
    pub id: u64,
    /// When it was committed, on the clock of [`EngineState::now_us`].
    pub at_us: u64,
    /// From its `schedule`, or the commit of the step before it if that came later, to its commit.
    pub duration_us: u64,
    /// Sequences that got their next token.
    pub decode_rows: u32,
    /// Their query tokens, drafts among them.
    pub decode_tokens: u32,
    /// Sequences of which a part of what is known was computed.
    pub prefill_rows: u32,
    /// Their query tokens.
    pub prefill_tokens: u32,
    /// Bytes of keys and values that the step had to read.
    pub kv_bytes: u64,
}

/// Blocks of the pool by who holds them, in the order of their ids, some of them together in a cell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolMap {
    /// Blocks of each cell but the last, which may have fewer. The null block is in none.
    pub blocks_per_cell: u32,
    /// Of each cell: blocks that are free, held by one request, held by several, and held by the tree alone.
    pub cells: Vec<[u32; 4]>,
}

/// The radix tree, drawn with its largest branches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeView {
    /// Blocks in it.
    pub blocks: u32,
    /// Runs of blocks between two branchings.
    pub edges: u32,
    /// Ends of paths.
    pub leaves: u32,
    /// Blocks of the longest path.
    pub depth: u32,
    /// The edges with the most blocks at and below them; of each, the one above it is here too.
    pub largest: Vec<TreeEdge>,
}

/// A run of blocks that have one child each, but for the last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeEdge {
    /// Blocks of the path before it.
    pub start: u32,
    /// Blocks of the run.
    pub blocks: u32,
    /// Those of them that requests hold.
    pub used: u32,
    /// Blocks at and below it.
    pub below: u32,
    /// Leaves at or below it.
    pub leaves: u32,
    /// Leaves left of it.
    pub first_leaf: u32,
}
