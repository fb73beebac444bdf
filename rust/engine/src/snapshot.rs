//! A picture of the pool and the tree from copies of slices: the control plane is held for one slice at a time.

use std::ops::Range;
use std::time::{Duration, Instant};

use octavo_core::view::{BlockState, BlockView};
use octavo_wire::{PoolMap, TreeEdge, TreeView};

/// Blocks that are copied while the control plane is held.
const SLICE: u32 = 4096;
/// Pause between two slices, so that whoever waits for the control plane is next: a lock that is taken again at once is not fair.
const PAUSE: Duration = Duration::from_micros(20);
/// Cells of a map at most.
const MAX_CELLS: u32 = 1024;
/// Edges of a tree that are drawn.
const MAX_EDGES: usize = 64;

/// How long a copy held the control plane up.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Held {
    pub(crate) longest: Duration,
    pub(crate) total: Duration,
}

/// Copies of all blocks, by `copy`, which takes the control plane for itself while it appends those of some ids.
pub(crate) fn copy_blocks(
    num_blocks: u32,
    mut copy: impl FnMut(Range<u32>, &mut Vec<BlockView>) -> Duration,
) -> (Vec<BlockView>, Held) {
    let mut blocks = Vec::with_capacity(num_blocks as usize);
    let mut held = Held::default();
    // Memory that is there already: new pages would be made while the control plane is held.
    let mut slice = Vec::with_capacity(SLICE as usize);
    for start in (0..num_blocks).step_by(SLICE as usize) {
        let time = copy(start..start.saturating_add(SLICE), &mut slice);
        blocks.append(&mut slice);
        held.longest = held.longest.max(time);
        held.total += time;
        std::thread::sleep(PAUSE);
    }
    (blocks, held)
}

/// Runs `work` and tells how long it took.
pub(crate) fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// Counts of consecutive blocks by state. `blocks[0]` is the null block, which is left out.
pub(crate) fn map(blocks: &[BlockView]) -> PoolMap {
    let blocks = blocks.get(1..).unwrap_or_default();
    let blocks_per_cell = (blocks.len() as u32).div_ceil(MAX_CELLS).max(1);
    let cells = blocks.chunks(blocks_per_cell as usize).map(|chunk| {
        let mut counts = [0; 4];
        for block in chunk {
            counts[match block.state {
                BlockState::Free => 0,
                BlockState::Private => 1,
                BlockState::Shared => 2,
                BlockState::Cached => 3,
            }] += 1;
        }
        counts
    });
    PoolMap {
        blocks_per_cell,
        cells: cells.collect(),
    }
}

/// The tree that the blocks' parents make. Blocks whose path was cut between two slices are left out.
pub(crate) fn tree(blocks: &[BlockView]) -> TreeView {
    if blocks.is_empty() {
        return TreeView::default();
    }
    let children = Children::new(blocks);
    let mut edges: Vec<TreeEdge> = Vec::new();
    let mut above: Vec<Option<usize>> = Vec::new();
    // Depth first, so that an edge comes after the one above it and leaves are numbered as they are drawn.
    let mut pending: Vec<(u32, u32, Option<usize>)> = Vec::new();
    let push = |pending: &mut Vec<_>, node: u32, start: u32, parent: Option<usize>| {
        let list = children.of(node).iter().rev();
        pending.extend(list.map(|&child| (child, start, parent)));
    };
    push(&mut pending, 0, 0, None);
    let mut leaves = 0;
    while let Some((mut node, start, parent)) = pending.pop() {
        let mut edge = TreeEdge {
            start,
            first_leaf: leaves,
            ..TreeEdge::default()
        };
        loop {
            edge.blocks += 1;
            edge.used += u32::from(blocks[node as usize].state != BlockState::Cached);
            match children.of(node) {
                [only] => node = *only,
                _ => break,
            }
        }
        edge.below = edge.blocks;
        if children.of(node).is_empty() {
            edge.leaves = 1;
            leaves += 1;
        }
        push(&mut pending, node, start + edge.blocks, Some(edges.len()));
        edges.push(edge);
        above.push(parent);
    }
    for index in (0..edges.len()).rev() {
        let TreeEdge { below, leaves, .. } = edges[index];
        if let Some(parent) = above[index] {
            edges[parent].below += below;
            edges[parent].leaves += leaves;
        }
    }
    let mut view = TreeView {
        blocks: edges.iter().map(|edge| edge.blocks).sum(),
        edges: edges.len() as u32,
        leaves,
        depth: edges
            .iter()
            .map(|edge| edge.start + edge.blocks)
            .max()
            .unwrap_or(0),
        largest: Vec::new(),
    };
    // An edge has more below it than those under it, and comes first: whoever is kept, what is above it is kept too.
    edges.sort_by_key(|edge| std::cmp::Reverse(edge.below));
    edges.truncate(MAX_EDGES);
    view.largest = edges;
    view
}

/// The children of every block, in one list.
struct Children {
    /// Where each block's begin; one more than there are blocks.
    starts: Vec<u32>,
    list: Vec<u32>,
}

impl Children {
    fn new(blocks: &[BlockView]) -> Self {
        let mut starts = vec![0; blocks.len() + 1];
        let parents = || {
            (0u32..).zip(blocks).skip(1).filter_map(|(id, block)| {
                let parent = block.parent?.0;
                ((parent as usize) < blocks.len()).then_some((id, parent))
            })
        };
        for (_, parent) in parents() {
            starts[parent as usize + 1] += 1;
        }
        for at in 1..starts.len() {
            starts[at] += starts[at - 1];
        }
        let mut free = starts.clone();
        let mut list = vec![0; starts.last().copied().unwrap_or(0) as usize];
        for (id, parent) in parents() {
            let place = &mut free[parent as usize];
            list[*place as usize] = id;
            *place += 1;
        }
        Self { starts, list }
    }

    fn of(&self, block: u32) -> &[u32] {
        let (start, end) = (self.starts[block as usize], self.starts[block as usize + 1]);
        &self.list[start as usize..end as usize]
    }
}

#[cfg(test)]
mod tests {
    use octavo_core::ids::BlockId;

    use super::*;

    fn block(state: BlockState, parent: Option<u32>) -> BlockView {
        BlockView {
            state,
            parent: parent.map(BlockId),
        }
    }

    #[test]
    fn edges_are_runs_of_single_children_and_leaves_are_numbered_in_order() {
        use BlockState::{Cached, Free, Private, Shared};
        // 0 ── 1 ── 2 ─┬─ 3 ── 4
        //              └─ 6
        //   └─ 5          7's path was cut
        let blocks = [
            block(Free, None),
            block(Shared, Some(0)),
            block(Shared, Some(1)),
            block(Private, Some(2)),
            block(Cached, Some(3)),
            block(Cached, Some(0)),
            block(Private, Some(2)),
            block(Cached, Some(8)),
            block(Free, None),
        ];
        let view = tree(&blocks);
        assert_eq!(
            (view.blocks, view.edges, view.leaves, view.depth),
            (6, 4, 3, 4)
        );
        let edge = |start, blocks, used, below, leaves, first_leaf| TreeEdge {
            start,
            blocks,
            used,
            below,
            leaves,
            first_leaf,
        };
        let expected = [
            edge(0, 2, 2, 5, 2, 0),
            edge(2, 2, 1, 2, 1, 0),
            edge(2, 1, 1, 1, 1, 1),
            edge(0, 1, 0, 1, 1, 2),
        ];
        assert_eq!(view.largest, expected);
    }

    #[test]
    fn two_slices_that_disagree_make_no_endless_path() {
        let blocks = [
            block(BlockState::Free, None),
            block(BlockState::Cached, Some(2)),
            block(BlockState::Cached, Some(1)),
            block(BlockState::Cached, Some(3)),
        ];
        assert_eq!(tree(&blocks), TreeView::default());
        assert_eq!(tree(&[]), TreeView::default());
    }

    #[test]
    fn a_map_has_a_bounded_number_of_cells_and_every_block_but_the_null_block() {
        for num_blocks in [1, 2, 1024, 1025, 1026, 5000] {
            let blocks = vec![block(BlockState::Cached, None); num_blocks];
            let map = map(&blocks);
            assert!(map.cells.len() <= MAX_CELLS as usize);
            let counted: u32 = map.cells.iter().flatten().sum();
            assert_eq!(counted as usize, num_blocks - 1);
            assert!(map.cells.iter().all(|cell| cell[3] <= map.blocks_per_cell));
        }
    }
}
