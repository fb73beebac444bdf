//! The blocks of window groups that the tree keeps beside its own: which node each belongs to, and which of them goes first. Knows
//! nothing of tokens or reference counts.

use crate::ids::BlockId;

/// A companion is a window group's block for the tokens of one node of the tree. Idle companions, held by the tree only, form a list
/// from the least to the most recently used.
#[derive(Debug)]
pub(crate) struct Companions {
    /// Companion of each node in each window group, or null: `[num_blocks, num_groups]`.
    of_node: Vec<BlockId>,
    num_groups: usize,
    /// By block id; entry 0 closes the list. Empty if there are no window groups.
    entries: Vec<Entry>,
    len: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// The node, or null if the block is no companion.
    node: BlockId,
    group: u32,
    is_idle: bool,
    previous: BlockId,
    next: BlockId,
    last_use: u64,
}

impl Companions {
    pub(crate) fn new(num_blocks: u32, num_groups: usize) -> Self {
        let n = if num_groups == 0 {
            0
        } else {
            num_blocks as usize
        };
        Self {
            of_node: vec![BlockId::NULL; n * num_groups],
            num_groups,
            entries: vec![Entry::default(); n],
            len: 0,
        }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.entry(block)
            .is_some_and(|entry| entry.node != BlockId::NULL)
    }

    /// The companion of a node in a group.
    pub(crate) fn get(&self, node: BlockId, group: usize) -> Option<BlockId> {
        let block = self.of_node[node.0 as usize * self.num_groups + group];
        (block != BlockId::NULL).then_some(block)
    }

    pub(crate) fn is_idle(&self, block: BlockId) -> bool {
        self.entry(block).is_some_and(|entry| entry.is_idle)
    }

    /// Makes `block`, in use and no companion, the companion of a node that has none in this group.
    pub(crate) fn insert(&mut self, node: BlockId, group: usize, block: BlockId) {
        self.of_node[node.0 as usize * self.num_groups + group] = block;
        self.entries[block.0 as usize] = Entry {
            node,
            group: group as u32,
            ..Entry::default()
        };
        self.len += 1;
    }

    /// Takes an idle companion from its node.
    pub(crate) fn remove(&mut self, block: BlockId) {
        self.set_used(block);
        let entry = std::mem::take(&mut self.entries[block.0 as usize]);
        self.of_node[entry.node.0 as usize * self.num_groups + entry.group as usize] =
            BlockId::NULL;
        self.len -= 1;
    }

    /// Notes that only the tree holds a companion from now on. `now` never falls.
    pub(crate) fn set_idle(&mut self, block: BlockId, now: u64) {
        let last = std::mem::replace(&mut self.entries[0].previous, block);
        self.entries[last.0 as usize].next = block;
        let entry = &mut self.entries[block.0 as usize];
        entry.is_idle = true;
        entry.last_use = now;
        (entry.previous, entry.next) = (last, BlockId::NULL);
    }

    /// Notes that an idle companion is in use again.
    pub(crate) fn set_used(&mut self, block: BlockId) {
        let entry = &mut self.entries[block.0 as usize];
        entry.is_idle = false;
        let (previous, next) = (entry.previous, entry.next);
        self.entries[previous.0 as usize].next = next;
        self.entries[next.0 as usize].previous = previous;
    }

    /// The idle companion that was used least recently, and when.
    pub(crate) fn first_idle(&self) -> Option<(u64, BlockId)> {
        let first = self.entries.first()?.next;
        (first != BlockId::NULL).then(|| (self.entries[first.0 as usize].last_use, first))
    }

    /// Forgets everything; calls `removed` for each block that was a companion.
    pub(crate) fn clear(&mut self, mut removed: impl FnMut(BlockId)) {
        for id in (1..self.entries.len()).rev() {
            if self.entries[id].node != BlockId::NULL {
                removed(BlockId(id as u32));
            }
        }
        self.entries.fill(Entry::default());
        self.of_node.fill(BlockId::NULL);
        self.len = 0;
    }

    /// Compares links and list with what `is_node`, `is_idle` and `last_use` of a node say.
    pub(crate) fn check(
        &self,
        is_node: impl Fn(BlockId) -> bool,
        is_idle: impl Fn(BlockId) -> bool,
        last_use: impl Fn(BlockId) -> u64,
    ) -> Result<(), String> {
        let mut num_idle = 0;
        let mut len = 0;
        for (id, entry) in self.entries.iter().enumerate().skip(1) {
            let (block, node) = (BlockId(id as u32), entry.node);
            if node == BlockId::NULL {
                continue;
            }
            len += 1;
            if !is_node(node) || is_node(block) {
                return Err(format!(
                    "block {block} is the companion of {node}, which is no node, or a node itself"
                ));
            }
            if self.get(node, entry.group as usize) != Some(block) {
                return Err(format!("node {node} does not know its companion {block}"));
            }
            if entry.is_idle != is_idle(block) || (is_idle(node) && !entry.is_idle) {
                return Err(format!(
                    "companion {block} has is_idle = {}, its node {node} {}",
                    entry.is_idle,
                    is_idle(node)
                ));
            }
            if is_idle(node) && entry.last_use > last_use(node) {
                return Err(format!("companion {block} outlives its node {node}"));
            }
            num_idle += usize::from(entry.is_idle);
        }
        let linked = self.of_node.iter().filter(|&&block| block != BlockId::NULL);
        if (len, linked.count()) != (self.len, len as usize) {
            return Err(format!("{} companions are counted, not {len}", self.len));
        }
        self.check_list(num_idle)
    }

    fn check_list(&self, num_idle: usize) -> Result<(), String> {
        let Some((mut last_use, mut block)) = self.first_idle() else {
            return match num_idle {
                0 => Ok(()),
                _ => Err(format!("{num_idle} companions are idle, none is listed")),
            };
        };
        let (mut previous, mut listed) = (BlockId::NULL, 0);
        while block != BlockId::NULL && listed <= num_idle {
            let entry = self.entries[block.0 as usize];
            if !entry.is_idle || entry.previous != previous || entry.last_use < last_use {
                return Err(format!(
                    "companion {block} is in the wrong place of the list"
                ));
            }
            listed += 1;
            last_use = entry.last_use;
            (previous, block) = (block, entry.next);
        }
        if listed != num_idle || self.entries[0].previous != previous {
            return Err(format!(
                "{num_idle} companions are idle, {listed} are listed"
            ));
        }
        Ok(())
    }

    fn entry(&self, block: BlockId) -> Option<&Entry> {
        self.entries.get(block.0 as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAST_USE: u64 = 9;

    /// Nodes 1 and 2 with companions 3 and 4 in group 0 and 5 in group 1; 3, 5 and 4 became idle in this order.
    fn companions() -> Companions {
        let mut companions = Companions::new(6, 2);
        for (node, group, block) in [(1, 0, 3), (2, 0, 4), (1, 1, 5)] {
            companions.insert(BlockId(node), group, BlockId(block));
        }
        for (now, block) in [(1, 3), (1, 5), (2, 4)] {
            companions.set_idle(BlockId(block), now);
        }
        companions
    }

    fn check(companions: &Companions) -> Result<(), String> {
        let is_idle = |block: BlockId| companions.is_idle(block) || block.0 < 3;
        companions.check(|block| [1, 2].contains(&block.0), is_idle, |_| LAST_USE)
    }

    #[test]
    fn idle_companions_come_by_last_use_and_those_used_again_last() {
        let mut companions = companions();
        companions.set_used(BlockId(5));
        companions.set_idle(BlockId(5), 3);
        let mut order = Vec::new();
        while let Some((now, block)) = companions.first_idle() {
            assert_eq!(check(&companions), Ok(()));
            companions.remove(block);
            order.push((now, block.0));
        }
        assert_eq!(order, [(1, 3), (2, 4), (3, 5)]);
        assert_eq!((companions.len(), check(&companions)), (0, Ok(())));
        assert_eq!(companions.get(BlockId(1), 1), None);
    }

    #[test]
    fn without_window_groups_nothing_is_a_companion() {
        let companions = Companions::new(6, 0);
        assert!(!companions.contains(BlockId(3)) && !companions.is_idle(BlockId(3)));
        assert_eq!(
            (companions.first_idle(), check(&companions)),
            (None, Ok(()))
        );
    }

    #[test]
    fn check_notices_each_kind_of_damage() {
        type Damage = fn(&mut Companions);
        let damages: [(&str, Damage); 7] = [
            ("which is no node", |companions| {
                companions.entries[3].node = BlockId(5)
            }),
            ("node 1 does not know its companion 3", |companions| {
                companions.of_node[2] = BlockId::NULL
            }),
            ("4 companions are counted, not 3", |companions| {
                companions.len = 4
            }),
            ("outlives its node", |companions| {
                companions.entries[4].last_use = LAST_USE + 1
            }),
            ("companion 5 is in the wrong place", |companions| {
                companions.entries[3].last_use = 2
            }),
            ("3 companions are idle, 2 are listed", |companions| {
                companions.entries[5].next = BlockId::NULL
            }),
            ("3 companions are idle, none is listed", |companions| {
                companions.entries[0].next = BlockId::NULL
            }),
        ];
        for (expected, damage) in damages {
            let mut companions = companions();
            assert_eq!(check(&companions), Ok(()));
            damage(&mut companions);
            let error = check(&companions).expect_err(expected);
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
