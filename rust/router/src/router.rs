//! The choice among replicas.

use crate::prefix::{CHUNK, Prefix};
use crate::prefix_set::PrefixSet;

/// Tokens to compute that one sequence in a replica weighs as much as.
const SEQUENCE_TOKENS: usize = 64;
/// Sequences that a replica may always have more than the one with the fewest.
const MIN_SLACK: usize = 32;

#[derive(Debug)]
struct Replica {
    is_up: bool,
    /// In it now.
    sequences: usize,
    prefixes: PrefixSet,
}

/// Sends requests to replicas and remembers where they went.
///
/// A replica's cost for a request is the tokens of the prompt that it would have to compute, plus the cached ones that it would have to
/// forget for them, plus 64 for each sequence that it has more than the least busy one. The lowest cost wins, then the fewer sequences,
/// then the emptier cache, then the lower number. A replica that has [`Router::slack`] sequences more than the least busy one
/// gets none, whatever it has cached.
#[derive(Debug)]
pub struct Router {
    replicas: Vec<Replica>,
}

impl Router {
    /// A router of `replicas` replicas, none of them up.
    #[must_use]
    pub fn new(replicas: usize) -> Self {
        let replica = || Replica {
            is_up: false,
            sequences: 0,
            prefixes: PrefixSet::new(0),
        };
        Self {
            replicas: (0..replicas).map(|_| replica()).collect(),
        }
    }

    /// How many replicas there are, up or not.
    #[must_use]
    pub fn num_replicas(&self) -> usize {
        self.replicas.len()
    }

    /// A replica takes requests from now on; its cache is empty and holds `cache_tokens` tokens.
    pub fn connect(&mut self, replica: usize, cache_tokens: usize) {
        // One replica needs no memory of what went where.
        let chunks = if self.replicas.len() > 1 {
            cache_tokens / CHUNK
        } else {
            0
        };
        self.replicas[replica] = Replica {
            is_up: true,
            sequences: 0,
            prefixes: PrefixSet::new(chunks),
        };
    }

    /// A replica is gone, and all that was in it.
    pub fn disconnect(&mut self, replica: usize) {
        self.replicas[replica] = Replica {
            is_up: false,
            sequences: 0,
            prefixes: PrefixSet::new(0),
        };
    }

    /// Chooses a replica for a request of `sequences` sequences and notes that it went there; none if none is up. `may` leaves replicas
    /// out. O(replicas · log prompt + prompt).
    pub fn route(
        &mut self,
        prefix: &Prefix,
        sequences: usize,
        may: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let open = |&(number, replica): &(usize, &Replica)| replica.is_up && may(number);
        let candidates = || self.replicas.iter().enumerate().filter(open);
        let least = candidates().map(|(_, replica)| replica.sequences).min()?;
        let most = least + Self::slack(least);
        let (chosen, _) = candidates()
            .filter(|(_, replica)| replica.sequences <= most)
            .min_by_key(|(_, replica)| {
                let cost = replica.cost(prefix, least);
                (cost, replica.sequences, replica.prefixes.len())
            })?;
        let replica = &mut self.replicas[chosen];
        replica.sequences += sequences;
        replica.prefixes.touch(&prefix.hashes);
        Some(chosen)
    }

    /// Sequences that a replica may have more than the least busy one, which has `least`, and still get another request.
    #[must_use]
    pub fn slack(least: usize) -> usize {
        MIN_SLACK.max(least / 2)
    }

    /// Sequences of a request have left a replica.
    pub fn finish(&mut self, replica: usize, sequences: usize) {
        let count = &mut self.replicas[replica].sequences;
        *count = count.saturating_sub(sequences);
    }

    /// A replica has computed this sequence: an answer, which may be the beginning of the next question.
    pub fn learn(&mut self, replica: usize, prefix: &Prefix) {
        self.replicas[replica].prefixes.touch(&prefix.hashes);
    }

    /// Sequences in a replica.
    #[must_use]
    pub fn num_sequences(&self, replica: usize) -> usize {
        self.replicas[replica].sequences
    }

    /// Tokens that a replica is thought to have cached.
    #[must_use]
    pub fn cached_tokens(&self, replica: usize) -> usize {
        self.replicas[replica].prefixes.len() * CHUNK
    }
}

impl Replica {
    /// In tokens; `least` sequences are in the least busy replica.
    fn cost(&self, prefix: &Prefix, least: usize) -> usize {
        let new = prefix.hashes.len() - self.prefixes.matched(&prefix.hashes);
        let free = self.prefixes.capacity() - self.prefixes.len();
        let forgotten = new.saturating_sub(free).min(self.prefixes.len());
        (new + forgotten) * CHUNK + (self.sequences - least) * SEQUENCE_TOKENS
    }
}
