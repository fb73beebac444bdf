//! Random numbers without state: each is a pure function of (seed, choice, domain, position, token id).
//!
//! Three levels, from once per request to once per token:
//!
//! 1. *slot key*, four words: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC '11) with the seed
//!    as key and (choice, domain, 0, 0) as counter;
//! 2. *row key*, four words: `mix(slot key, 4 · position + i)`;
//! 3. *bits* of a token: `mix(row key, token id)`.
//!
//! `mix` is an iterated Even–Mansour permutation of 32-bit words: the rounds and constants are those of Wellons' `triple32`
//! (github.com/skeeto/hash-prospector), with one key word added or XORed in each round. `octavo/sampling/rng.py` is its twin,
//! `tests/vectors/rng.json` binds the two; the statistical tests are `tests/unit/sampling/test_rng.py`.

/// What a number is drawn for; the same position never shares numbers between domains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Domain {
    /// The token itself.
    Target = 0,
    /// A draft's token.
    Draft = 1,
    /// Whether a draft is accepted.
    Accept = 2,
    /// The token after a refused draft.
    Residual = 3,
}

/// A key of `mix`.
type Key = [u32; 4];

/// Philox4x32-10 of one counter.
fn philox([mut c0, mut c1, mut c2, mut c3]: Key, [mut k0, mut k1]: [u32; 2]) -> Key {
    let wide = |a: u32, b: u32| {
        let product = u64::from(a) * u64::from(b);
        ((product >> 32) as u32, product as u32)
    };
    for _ in 0..10 {
        let (high0, low0) = wide(c0, 0xD251_1F53);
        let (high1, low1) = wide(c2, 0xCD9E_8D57);
        (c0, c1, c2, c3) = (high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0);
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    [c0, c1, c2, c3]
}

/// The keyed permutation of words.
fn mix(key: &Key, word: u32) -> u32 {
    let mut x = word.wrapping_add(key[0]);
    x = (x ^ (x >> 17)).wrapping_mul(0xED5A_D4BB) ^ key[1];
    x = (x ^ (x >> 11))
        .wrapping_mul(0xAC4C_1B51)
        .wrapping_add(key[2]);
    x = (x ^ (x >> 15)).wrapping_mul(0x3184_8BAB) ^ key[3];
    x ^ (x >> 14)
}

/// The numbers of one choice of a request in one domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotKey(Key);

impl SlotKey {
    /// From the request's seed and the index among its choices.
    pub fn new(seed: u64, choice: u32, domain: Domain) -> Self {
        Self(philox(
            [choice, domain as u32, 0, 0],
            [seed as u32, (seed >> 32) as u32],
        ))
    }

    /// The numbers for the token at `position` (below 2³⁰) of the sequence.
    pub fn row(&self, position: u32) -> RowKey {
        let first = position.wrapping_mul(4);
        RowKey(std::array::from_fn(|lane| {
            mix(&self.0, first.wrapping_add(lane as u32))
        }))
    }
}

/// The numbers for one position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowKey(Key);

impl RowKey {
    /// 32 random bits for a token.
    pub fn bits(&self, token: u32) -> u32 {
        mix(&self.0, token)
    }

    /// A number of the open interval (0, 1).
    pub fn uniform(&self, token: u32) -> f64 {
        (f64::from(self.bits(token)) + 0.5) / 4_294_967_296.0
    }

    /// A standard exponential number. The argmax over tokens of `logp − ln(exponential)` is a draw of the distribution.
    pub fn exponential(&self, token: u32) -> f64 {
        -(-self.uniform(token)).ln_1p()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn vectors() -> serde_json::Value {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/rng.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn word(value: &serde_json::Value) -> u32 {
        u32::try_from(value.as_u64().unwrap()).unwrap()
    }

    #[test]
    fn philox_gives_the_published_answers() {
        let answers = &vectors()["philox"];
        assert_eq!(answers.as_array().unwrap().len(), 3);
        for answer in answers.as_array().unwrap() {
            let words = |i: usize| {
                answer[i]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(word)
                    .collect::<Vec<_>>()
            };
            let (counter, key) = (words(0).try_into().unwrap(), words(1).try_into().unwrap());
            assert_eq!(philox(counter, key).to_vec(), words(2));
        }
    }

    #[test]
    fn every_vector_of_the_shared_file_is_met() {
        let domains = [
            Domain::Target,
            Domain::Draft,
            Domain::Accept,
            Domain::Residual,
        ];
        let rows = vectors()["rows"].as_array().unwrap().clone();
        assert!(rows.len() > 1_000);
        for row in rows {
            let seed: u64 = row[0].as_str().unwrap().parse().unwrap();
            let key = SlotKey::new(seed, word(&row[1]), domains[word(&row[2]) as usize])
                .row(word(&row[3]));
            assert_eq!(key.bits(word(&row[4])), word(&row[5]), "{row}");
            let wanted = row[6].as_f64().unwrap();
            assert!(
                (key.exponential(word(&row[4])) - wanted).abs() <= 1e-12 * wanted,
                "{row}"
            );
        }
    }

    #[test]
    fn races_draw_tokens_as_often_as_they_are_likely() {
        let probabilities = [0.5_f64, 0.3, 0.15, 0.05];
        let slot = SlotKey::new(7, 0, Domain::Target);
        let mut counts = [0_f64; 4];
        let rows = 100_000_u32;
        for position in 0..rows {
            let key = slot.row(position);
            let score =
                |token: usize| probabilities[token].ln() - key.exponential(token as u32).ln();
            let winner = (0..4)
                .max_by(|&a, &b| score(a).total_cmp(&score(b)))
                .unwrap();
            counts[winner] += 1.0;
        }
        let chi_square: f64 = probabilities
            .iter()
            .zip(counts)
            .map(|(p, count)| (count - p * f64::from(rows)).powi(2) / (p * f64::from(rows)))
            .sum();
        // Three degrees of freedom: exceeded once in 10,000 seeds.
        assert!(chi_square < 21.1, "{chi_square}");
    }
}
