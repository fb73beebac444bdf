//! Which request kills the engine.
//!
//! When the process dies in a step, the requests in it are suspects. They run again in halves with everybody else kept out, until each has
//! made progress and is cleared; whoever was in the deadly step alone, and kills the engine alone once more, is condemned. Deaths from outside
//! (somebody's `kill`) make no suspects, unless they go on while nothing makes progress.

/// Deaths from outside in a row, without progress of anybody, after which they are taken for the requests' fault.
const PATIENCE: u32 = 3;

/// The suspects.
#[derive(Debug, Default)]
pub(crate) struct Blame {
    /// Groups that must run by themselves; the last one is running.
    groups: Vec<Vec<u64>>,
    silent_deaths: u32,
}

impl Blame {
    /// The engine died with `suspects` in its steps. Returns the request that is to blame for sure.
    ///
    /// Requests must have been told of with [`Blame::leave`] when they ended.
    pub(crate) fn died(&mut self, mut suspects: Vec<u64>, from_outside: bool) -> Option<u64> {
        self.silent_deaths += 1;
        if suspects.is_empty() || (from_outside && self.silent_deaths < PATIENCE) {
            return None;
        }
        if let [only] = suspects[..]
            && self.groups.last().is_some_and(|group| group[..] == [only])
        {
            self.leave(only);
            return Some(only);
        }
        for group in &mut self.groups {
            group.retain(|id| !suspects.contains(id));
        }
        self.groups.retain(|group| !group.is_empty());
        let rest = suspects.split_off(suspects.len().div_ceil(2));
        if !rest.is_empty() {
            self.groups.push(rest);
        }
        self.groups.push(suspects);
        None
    }

    /// A request got a token. True if that changes who may run.
    pub(crate) fn progressed(&mut self, id: u64) -> bool {
        self.silent_deaths = 0;
        self.clear(id, self.groups.len().saturating_sub(1))
    }

    /// A request is no more. True if that changes who may run.
    pub(crate) fn leave(&mut self, id: u64) -> bool {
        self.clear(id, 0)
    }

    /// Takes a request out of the groups from `first` on; true if the running one got empty.
    fn clear(&mut self, id: u64, first: usize) -> bool {
        let running = self.groups.len();
        for group in &mut self.groups[first..] {
            group.retain(|&suspect| suspect != id);
        }
        let ended = self.groups.last().is_some_and(Vec::is_empty);
        self.groups.retain(|group| !group.is_empty());
        debug_assert!(self.groups.len() <= running, "groups are only taken away");
        ended
    }

    /// Whether a request is a suspect.
    pub(crate) fn suspects(&self, id: u64) -> bool {
        self.groups.iter().any(|group| group.contains(&id))
    }

    /// Lets every suspect go, and returns them.
    pub(crate) fn dismiss(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.groups).concat()
    }

    /// Whether a request may be in the engine now.
    pub(crate) fn admits(&self, id: u64) -> bool {
        self.groups.last().is_none_or(|group| group.contains(&id))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Runs all requests on an engine that dies whenever a killer is in a step. Returns those condemned, and the number of deaths.
    fn simulate(requests: u64, killers: &BTreeSet<u64>, batch: usize) -> (BTreeSet<u64>, u32) {
        let (mut blame, mut condemned, mut deaths) = (Blame::default(), BTreeSet::new(), 0);
        let mut alive: BTreeSet<u64> = (0..requests).collect();
        while !alive.is_empty() {
            let step: Vec<u64> = alive
                .iter()
                .copied()
                .filter(|&id| blame.admits(id))
                .take(batch)
                .collect();
            assert!(!step.is_empty(), "somebody may always run");
            if step.iter().any(|id| killers.contains(id)) {
                deaths += 1;
                if let Some(guilty) = blame.died(step, false) {
                    assert!(alive.remove(&guilty), "condemned twice");
                    condemned.insert(guilty);
                }
            } else {
                for id in step {
                    blame.progressed(id);
                    blame.leave(id);
                    alive.remove(&id);
                }
            }
        }
        assert!(blame.groups.is_empty());
        (condemned, deaths)
    }

    proptest! {
        #[test]
        fn exactly_the_killers_are_condemned(
            requests in 1..40_u64,
            killers in prop::collection::btree_set(0..40_u64, 0..4),
            batch in 1..40_usize,
        ) {
            let (condemned, _) = simulate(requests, &killers, batch);
            let expected: BTreeSet<u64> = killers.into_iter().filter(|&id| id < requests).collect();
            prop_assert_eq!(condemned, expected);
        }
    }

    #[test]
    fn one_killer_among_32_is_found_in_seven_deaths() {
        for killer in 0..32 {
            let (condemned, deaths) = simulate(32, &BTreeSet::from([killer]), 32);
            assert_eq!(condemned, BTreeSet::from([killer]));
            assert!(deaths <= 7, "{deaths} deaths");
        }
    }

    #[test]
    fn deaths_from_outside_make_no_suspects_while_there_is_progress() {
        let mut blame = Blame::default();
        for _ in 0..20 {
            assert_eq!(blame.died(vec![1, 2], true), None);
            assert!(blame.groups.is_empty());
            blame.progressed(1);
        }
    }

    #[test]
    fn deaths_from_outside_without_progress_do() {
        let mut blame = Blame::default();
        let condemned = (0..9).find_map(|_| {
            let step = [1, 2].into_iter().filter(|&id| blame.admits(id)).collect();
            blame.died(step, true)
        });
        assert_eq!(condemned, Some(1));
    }

    #[test]
    fn a_single_death_condemns_nobody() {
        let mut blame = Blame::default();
        assert_eq!(blame.died(vec![7], false), None);
        assert!(blame.admits(7));
        assert!(!blame.admits(8));
        assert!(blame.progressed(7), "the others may run again");
        assert!(blame.admits(8));
        assert_eq!(
            blame.died(vec![7], false),
            None,
            "progress resets the count"
        );
    }

    #[test]
    fn a_cleared_suspect_stays_out_of_what_is_decided_about_others() {
        let mut blame = Blame::default();
        blame.died(vec![1, 2], false);
        assert!(blame.admits(1));
        assert!(blame.progressed(1));
        assert!(!blame.admits(1), "2 runs alone now");
        assert!(blame.admits(2));
    }
}
