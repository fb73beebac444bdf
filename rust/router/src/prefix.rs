//! A sequence as the router sees it: one hash for each of its beginnings.

use std::hash::{DefaultHasher, Hasher};

/// Tokens by which one beginning is longer than the one before it.
pub const CHUNK: usize = 16;

/// Hashes of a sequence's beginnings of 16, 32, 48 … tokens. Each is a hash of the one before it and of the tokens that follow, so equal
/// hashes mean equal beginnings (up to collisions, which mislead the router and nobody else).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prefix {
    pub(crate) hashes: Vec<u64>,
}

impl Prefix {
    /// Of `tokens` among the sequences that share cached prefixes with each other: those of one `namespace`. O(tokens).
    #[must_use]
    pub fn new(namespace: u64, tokens: &[u32]) -> Self {
        let mut before = namespace;
        let chunks = tokens.chunks_exact(CHUNK);
        let hashes = chunks.map(|chunk| {
            let mut hasher = DefaultHasher::new();
            hasher.write_u64(before);
            for &token in chunk {
                hasher.write_u32(token);
            }
            before = hasher.finish();
            before
        });
        Self {
            hashes: hashes.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_beginnings_have_equal_hashes_and_others_have_not() {
        let tokens: Vec<u32> = (0..100).collect();
        let mut other = tokens.clone();
        other[40] = 1000;
        let (one, two) = (Prefix::new(7, &tokens), Prefix::new(7, &other));
        assert_eq!(one.hashes.len(), 100 / CHUNK);
        assert_eq!(one.hashes[..2], two.hashes[..2]);
        assert!(
            one.hashes[2..]
                .iter()
                .zip(&two.hashes[2..])
                .all(|(a, b)| a != b)
        );
        let salted = Prefix::new(8, &tokens);
        assert!(one.hashes.iter().all(|hash| !salted.hashes.contains(hash)));
    }
}
