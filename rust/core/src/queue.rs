//! The waiting queue: priority, then fairness between tenants, then the longest cached prefix, with ageing.
//!
//! Everything is O(log waiting); only the first [`WINDOW`] requests of one tenant are ever looked at together.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use crate::cache::KvCache;
use crate::params::Pooling;
use crate::policy::Tenants;
use crate::request::{Arena, SeqKey, Sequence};

/// Requests among which the longest cached prefix is looked for.
const WINDOW: usize = 64;
/// How often later requests may be taken before one.
pub(crate) const MAX_BYPASSED: u32 = 16;

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

impl WaitingQueue {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Puts a sequence at the place of its arrival: at the head if it was preempted.
    pub(crate) fn push(&mut self, key: SeqKey, sequence: &Sequence, tenants: &mut Tenants) {
        let class = self.classes.entry(sequence.priority).or_default();
        self.len += 1;
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

    /// The sequence to admit next; it stays in the queue.
    pub(crate) fn select(
        &mut self,
        seqs: &mut Arena,
        tenants: &mut Tenants,
        cache: &KvCache,
    ) -> Option<SeqKey> {
        let class = self.classes.values_mut().next()?;
        if let Some(&key) = class.resumed.values().next() {
            return Some(key);
        }
        if class.chosen.is_none() {
            let tenant = class.next_tenant(tenants)?;
            class.chosen = class.lines[&tenant].choose(seqs, cache);
        }
        class.chosen
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
    /// The tenant that was served least.
    fn next_tenant(&mut self, tenants: &mut Tenants) -> Option<u32> {
        loop {
            let &(turn, tenant) = self.turns.first()?;
            let served = tenants.served(tenant);
            if served == turn {
                tenants.advance_floor(served);
                return Some(tenant);
            }
            self.turns.pop_first();
            self.turns.insert((served, tenant));
            self.lines
                .get_mut(&tenant)
                .expect("each turn has its line")
                .turn = served;
        }
    }
}

impl Line {
    /// The longest cached prefix of the window, the earliest among equals; before that, whoever was passed over too often.
    fn choose(&self, seqs: &mut Arena, cache: &KvCache) -> Option<SeqKey> {
        let mut best: Option<(SeqKey, u32)> = None;
        for &key in self.by_arrival.values().take(WINDOW) {
            let sequence = &mut seqs[key];
            if sequence.bypassed >= MAX_BYPASSED {
                return Some(key);
            }
            let cached = match_prefix(sequence, cache);
            if best.is_none_or(|(_, longest)| cached > longest) {
                best = Some((key, cached));
            }
        }
        best.map(|(key, _)| key)
    }
}

/// Blocks of the sequence's known tokens that are cached and that every group can go on from. Nothing is looked up again while the tree
/// is the same; else the look-up goes on where it ended.
pub(crate) fn match_prefix(sequence: &mut Sequence, cache: &KvCache) -> u32 {
    if sequence.match_version != Some(cache.version()) {
        // Hidden states are needed of the last known token, of those whose prompt logprobs are still to come, and of all for a mean.
        let first_needed = if sequence.params.pooling == Some(Pooling::Mean) {
            0
        } else if sequence.wants_prompt_logprobs() {
            sequence.prompt_logprobs_done - 1
        } else {
            sequence.num_tokens() - 1
        };
        let max_blocks = first_needed / cache.block_size();
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
