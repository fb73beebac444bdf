//! The waiting queue: priority, then fairness between tenants, then the longest cached prefix, with ageing.
//!
//! Whoever would compute a block that a running prefill computes next is held back until the tree has it, and others go meanwhile.
//!
//! Everything is O(log waiting); only the first [`WINDOW`] requests of one tenant are ever looked at together, and fewer than
//! [`MAX_PASSED`] + [`WINDOW`] that are held back.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::cache::KvCache;
use crate::policy::Tenants;
use crate::request::{Arena, SeqKey, Sequence};

/// Requests among which the longest cached prefix is looked for.
const WINDOW: usize = 64;
/// How often later requests may be taken before one.
pub(crate) const MAX_BYPASSED: u32 = 16;
/// Held ones after which no further tenant or class is looked at: a bound for the time of one choice.
const MAX_PASSED: usize = 2 * WINDOW;

/// Sequences that wait for admission.
#[derive(Debug, Default)]
pub(crate) struct WaitingQueue {
    /// By priority, the lowest first; no class is empty.
    classes: BTreeMap<i32, Class>,
    len: usize,
}

/// Sequences of one priority.
#[derive(Debug, Default)]
struct Class {
    /// Preempted ones, by arrival: they go before everyone else.
    resumed: BTreeMap<u64, SeqKey>,
    /// By tenant; no line is empty.
    lines: BTreeMap<u32, Line>,
    /// Sequences in all lines, and preempted ones.
    len: usize,
    /// (served tokens, tenant) of every line. Served tokens only grow, so a key that is out of date is too small and is renewed when
    /// it comes first.
    turns: BTreeSet<(u64, u32)>,
    /// Chosen, but not admitted yet: stays the next until something goes before it.
    chosen: Option<SeqKey>,
}

/// Sequences of one priority and tenant.
#[derive(Debug)]
struct Line {
    turn: u64,
    by_arrival: BTreeMap<u64, SeqKey>,
}

/// What a choice depends on, besides the queue.
pub(crate) struct View<'a> {
    pub(crate) seqs: &'a mut Arena,
    pub(crate) tenants: &'a mut Tenants,
    pub(crate) cache: &'a KvCache,
    /// Running sequences that may have known tokens left which no step computes yet; none without the prefix cache.
    pub(crate) prefills: &'a [SeqKey],
    pub(crate) free_slots: usize,
}

impl WaitingQueue {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Puts a sequence at the place of its arrival: at the head if it was preempted.
    pub(crate) fn push(&mut self, key: SeqKey, sequence: &Sequence, tenants: &mut Tenants) {
        let class = self.classes.entry(sequence.priority).or_default();
        self.len += 1;
        class.len += 1;
        if sequence.is_resumed {
            class.resumed.insert(sequence.arrival, key);
            class.chosen = None;
            return;
        }
        let tenant = sequence.tenant_index;
        let line = class.lines.entry(tenant).or_insert_with(|| {
            let turn = tenants.start_waiting(tenant);
            class.turns.insert((turn, tenant));
            Line {
                turn,
                by_arrival: BTreeMap::new(),
            }
        });
        line.by_arrival.insert(sequence.arrival, key);
    }

    /// Takes a sequence out, wherever it stands.
    pub(crate) fn remove(&mut self, key: SeqKey, sequence: &Sequence) {
        let class = self
            .classes
            .get_mut(&sequence.priority)
            .expect("a waiting sequence has its class");
        self.len -= 1;
        class.len -= 1;
        if class.chosen == Some(key) {
            class.chosen = None;
        }
        if class.resumed.remove(&sequence.arrival).is_none() {
            let tenant = sequence.tenant_index;
            let line = class
                .lines
                .get_mut(&tenant)
                .expect("a waiting sequence has its line");
            line.by_arrival.remove(&sequence.arrival);
            if line.by_arrival.is_empty() {
                class.turns.remove(&(line.turn, tenant));
                class.lines.remove(&tenant);
            }
        }
        if class.resumed.is_empty() && class.lines.is_empty() {
            self.classes.remove(&sequence.priority);
        }
    }

    /// The sequence to admit next; it stays in the queue. None if all that were looked at are held back.
    pub(crate) fn select(&mut self, view: &mut View<'_>) -> Option<SeqKey> {
        let (mut passed, mut ahead) = (0, 0);
        for class in self.classes.values_mut() {
            // Less urgent ones do not take the slots that those held back will need in a moment.
            if passed >= MAX_PASSED || ahead >= view.free_slots {
                break;
            }
            if let Some(&key) = class.resumed.values().next() {
                // Blocks were short, so nobody passes it.
                return (!view.is_held_back(key)).then_some(key);
            }
            if class.chosen.is_none_or(|key| view.is_held_back(key)) {
                class.chosen = class.choose(view, &mut passed);
            }
            if class.chosen.is_some() {
                return class.chosen;
            }
            ahead += class.len;
        }
        None
    }

    /// Takes out the sequence that is admitted, and notes whom it went before.
    pub(crate) fn take(&mut self, key: SeqKey, seqs: &mut Arena) {
        let sequence = &seqs[key];
        let (priority, arrival, tenant) =
            (sequence.priority, sequence.arrival, sequence.tenant_index);
        if !sequence.is_resumed {
            let line = &self.classes[&priority].lines[&tenant];
            for (_, &earlier) in line.by_arrival.range(..arrival) {
                seqs[earlier].bypassed += 1;
            }
        }
        self.remove(key, &seqs[key]);
    }

    /// Every waiting sequence.
    pub(crate) fn iter(&self) -> impl Iterator<Item = SeqKey> {
        self.classes.values().flat_map(|class| {
            let lines = class
                .lines
                .values()
                .flat_map(|line| line.by_arrival.values());
            class.resumed.values().chain(lines).copied()
        })
    }

    /// Everyone stands where priority, tenant and arrival say.
    pub(crate) fn check_integrity(&self, seqs: &Arena) -> Result<(), String> {
        for (&priority, class) in &self.classes {
            if class.resumed.is_empty() && class.lines.is_empty() {
                return Err(format!("the class of priority {priority} is empty"));
            }
            let in_lines: usize = class.lines.values().map(|line| line.by_arrival.len()).sum();
            if class.resumed.len() + in_lines != class.len {
                return Err(format!(
                    "the class of priority {priority} counts {}",
                    class.len
                ));
            }
            let turns: BTreeSet<(u64, u32)> = class
                .lines
                .iter()
                .map(|(&tenant, line)| (line.turn, tenant))
                .collect();
            if turns != class.turns {
                return Err(format!(
                    "the turns of priority {priority} are not those of its lines"
                ));
            }
            let lines = class.lines.iter().flat_map(|(&tenant, line)| {
                line.by_arrival
                    .iter()
                    .map(move |(&arrival, &key)| (Some(tenant), arrival, key))
            });
            let resumed = class
                .resumed
                .iter()
                .map(|(&arrival, &key)| (None, arrival, key));
            for (tenant, arrival, key) in lines.chain(resumed) {
                let sequence = &seqs[key];
                let is_in_place = sequence.priority == priority
                    && sequence.arrival == arrival
                    && sequence.is_resumed == tenant.is_none()
                    && tenant.is_none_or(|tenant| tenant == sequence.tenant_index);
                if !is_in_place || sequence.bypassed > MAX_BYPASSED {
                    return Err(format!(
                        "request {} is in the wrong place of the queue",
                        sequence.id
                    ));
                }
            }
            if class.lines.values().any(|line| line.by_arrival.is_empty()) {
                return Err(format!("a line of priority {priority} is empty"));
            }
        }
        Ok(())
    }
}

impl Class {
    /// The first tenant in turn with a sequence that is not held back; adds those held back before to `passed`.
    fn choose(&mut self, view: &mut View<'_>, passed: &mut usize) -> Option<SeqKey> {
        let mut last = None;
        while let Some(turn) = self.next_turn(last, view.tenants) {
            let (served, tenant) = turn;
            if last.is_none() {
                view.tenants.advance_floor(served);
            }
            let chosen = self.lines[&tenant].choose(view, passed);
            if chosen.is_some() || *passed >= MAX_PASSED {
                return chosen;
            }
            last = Some(turn);
        }
        None
    }

    /// The turn after `last`, or the first: (served tokens, tenant) of who was served least.
    fn next_turn(&mut self, last: Option<(u64, u32)>, tenants: &Tenants) -> Option<(u64, u32)> {
        let start = last.map_or(Bound::Unbounded, Bound::Excluded);
        loop {
            let &(turn, tenant) = self.turns.range((start, Bound::Unbounded)).next()?;
            let served = tenants.served(tenant);
            if served == turn {
                return Some((turn, tenant));
            }
            self.turns.remove(&(turn, tenant));
            self.turns.insert((served, tenant));
            self.lines
                .get_mut(&tenant)
                .expect("each turn has its line")
                .turn = served;
        }
    }
}

impl Line {
    /// Of those in the window that are not held back, the longest cached prefix, the earliest among equals; before that, whoever was
    /// passed over too often. Nobody passes such a one, even while it is held back.
    fn choose(&self, view: &mut View<'_>, passed: &mut usize) -> Option<SeqKey> {
        let mut best: Option<(SeqKey, u32)> = None;
        for &key in self.by_arrival.values().take(WINDOW) {
            let is_due = view.seqs[key].bypassed >= MAX_BYPASSED;
            if view.is_held_back(key) {
                *passed += 1;
                if is_due {
                    break;
                }
                continue;
            }
            if is_due {
                return Some(key);
            }
            let cached = match_prefix(&mut view.seqs[key], view.cache);
            if best.is_none_or(|(_, longest)| cached > longest) {
                best = Some((key, cached));
            }
        }
        best.map(|(key, _)| key)
    }
}

impl View<'_> {
    /// Whether the block behind a waiting sequence's match is the one that a running prefill, as urgent as it, computes next.
    ///
    /// It ends when that one has got tokens for the rest of the block, as it does whenever a step has any to give, or is gone: what a
    /// sequence is held back for is its own prefill, done by another. The tree has one path for the same tokens, so equal cursors mean
    /// equal beginnings.
    fn is_held_back(&mut self, key: SeqKey) -> bool {
        if self.prefills.is_empty() {
            return false;
        }
        let (size, sequence) = (self.cache.block_size(), &mut self.seqs[key]);
        let cached = match_prefix(sequence, self.cache);
        if cached >= sequence.max_match(size) {
            return false;
        }
        let next_block = (cached * size) as usize..((cached + 1) * size) as usize;
        let sequence = &self.seqs[key];
        self.prefills.iter().any(|&prefill| {
            let running = &self.seqs[prefill];
            running.cursor == sequence.usable
                && running.priority <= sequence.priority
                && running.tokens.get(next_block.clone()) == sequence.tokens.get(next_block.clone())
        })
    }
}

/// Blocks of the sequence's known tokens that are cached and that every group can go on from. Nothing is looked up again while the tree
/// is the same; else the look-up goes on where it ended.
pub(crate) fn match_prefix(sequence: &mut Sequence, cache: &KvCache) -> u32 {
    if sequence.match_version != Some(cache.version()) {
        let max_blocks = sequence.max_match(cache.block_size());
        cache.extend_match(
            sequence.namespace,
            &mut sequence.cursor,
            &sequence.tokens,
            max_blocks,
        );
        sequence.usable = cache.usable_match(sequence.cursor);
        sequence.match_version = Some(cache.version());
    }
    sequence.usable.depth()
}
