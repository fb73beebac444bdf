//! The beginnings that one replica has probably cached, as many as fit, the most recently used ones.

use std::collections::HashMap;

/// No entry.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: u64,
    newer: u32,
    older: u32,
}

/// A bounded set of hashes in the order of their use.
///
/// Whenever a hash is in it, so are those of all shorter beginnings: a use touches the longest beginning first and the shortest last, so that
/// a beginning is never older than one that goes on from it.
#[derive(Debug)]
pub(crate) struct PrefixSet {
    capacity: usize,
    /// A doubly linked list in an arena; there are no holes, as entries only ever replace each other.
    entries: Vec<Entry>,
    places: HashMap<u64, u32>,
    newest: u32,
    oldest: u32,
}

impl PrefixSet {
    /// An empty set of at most `capacity` hashes.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.min(NONE as usize - 1),
            entries: Vec::new(),
            places: HashMap::new(),
            newest: NONE,
            oldest: NONE,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// How many of the leading hashes are in the set. O(log n).
    pub(crate) fn matched(&self, hashes: &[u64]) -> usize {
        hashes.partition_point(|hash| self.places.contains_key(hash))
    }

    /// Uses a sequence's beginnings, and forgets the oldest if there is no room. O(n).
    pub(crate) fn touch(&mut self, hashes: &[u64]) {
        for &hash in hashes[..hashes.len().min(self.capacity)].iter().rev() {
            let place = match self.places.get(&hash) {
                Some(&place) => {
                    self.unlink(place);
                    place
                }
                None => self.make_room(hash),
            };
            self.places.insert(hash, place);
            self.link_newest(place, hash);
        }
    }

    /// A place that is in no list.
    fn make_room(&mut self, hash: u64) -> u32 {
        if self.entries.len() < self.capacity {
            self.entries.push(Entry {
                hash,
                newer: NONE,
                older: NONE,
            });
            return self.entries.len() as u32 - 1;
        }
        let place = self.oldest;
        self.unlink(place);
        self.places.remove(&self.entries[place as usize].hash);
        place
    }

    fn unlink(&mut self, place: u32) {
        let Entry { newer, older, .. } = self.entries[place as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.entries[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.entries[older as usize].newer = newer,
        }
    }

    fn link_newest(&mut self, place: u32, hash: u64) {
        self.entries[place as usize] = Entry {
            hash,
            newer: NONE,
            older: self.newest,
        };
        match self.newest {
            NONE => self.oldest = place,
            newest => self.entries[newest as usize].newer = place,
        }
        self.newest = place;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{CHUNK, Prefix};

    /// Uses in order, the newest last.
    fn in_order(set: &PrefixSet) -> Vec<u64> {
        let (mut place, mut found) = (set.oldest, Vec::new());
        while place != NONE {
            found.push(set.entries[place as usize].hash);
            place = set.entries[place as usize].newer;
        }
        found
    }

    proptest! {
        #[test]
        fn it_holds_the_latest_uses_that_fit_and_every_shorter_beginning(
            capacity in 1..12_usize,
            uses in prop::collection::vec(prop::collection::vec(0..3_u32, 0..8), 0..40),
        ) {
            let mut set = PrefixSet::new(capacity);
            let mut naive: Vec<u64> = Vec::new();
            for path in uses {
                let tokens: Vec<u32> = path.iter().flat_map(|&step| [step; CHUNK]).collect();
                let hashes = Prefix::new(0, &tokens).hashes;
                set.touch(&hashes);
                for hash in hashes[..hashes.len().min(capacity)].iter().rev() {
                    naive.retain(|other| other != hash);
                    naive.push(*hash);
                    if naive.len() > capacity {
                        naive.remove(0);
                    }
                }
                prop_assert_eq!(in_order(&set), naive.clone());
                prop_assert!(set.places.len() == set.len() && set.len() <= capacity);
                let expected = hashes.iter().take_while(|hash| naive.contains(hash)).count();
                prop_assert_eq!(set.matched(&hashes), expected);
                prop_assert_eq!(expected, hashes.len().min(capacity), "what was used last is there");
            }
        }
    }
}
