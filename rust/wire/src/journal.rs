//! The step journal: which requests are in the steps that an engine has in flight, in a file that outlives its process.
//!
//! The engine writes it whole, in one system call, after each `schedule` and each `commit`; the front reads it once the process is
//! dead. Words are `u64`, little-endian: magic, last step, count, ids.

const MAGIC: u64 = u64::from_le_bytes(*b"octavoJ1");
const HEADER_WORDS: usize = 3;

/// The steps in flight when the process died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journal {
    /// Number of the last step scheduled.
    pub step: u64,
    /// Requests with a row in a step that is not committed, each once.
    pub requests: Vec<u64>,
}

/// Writes a journal's bytes into `out`, which is cleared first.
pub fn encode(step: u64, requests: &[u64], out: &mut Vec<u8>) {
    out.clear();
    for word in [MAGIC, step, requests.len() as u64].iter().chain(requests) {
        out.extend_from_slice(&word.to_le_bytes());
    }
}

/// Reads a journal; none if the bytes are not a whole one. What an earlier, longer journal left behind the end is ignored.
#[must_use]
pub fn decode(bytes: &[u8]) -> Option<Journal> {
    let (words, _) = bytes.as_chunks::<8>();
    let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
    if words.next()? != MAGIC {
        return None;
    }
    let (step, count) = (words.next()?, usize::try_from(words.next()?).ok()?);
    if count > bytes.len() / 8 - HEADER_WORDS {
        return None;
    }
    Some(Journal {
        step,
        requests: words.take(count).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_is_read_as_it_was_written_whatever_an_earlier_one_left_behind() {
        let mut file = Vec::new();
        encode(1, &[9, 8, 7, 6], &mut file);
        let mut later = Vec::new();
        encode(2, &[5], &mut later);
        file[..later.len()].copy_from_slice(&later);
        let expected = Journal {
            step: 2,
            requests: vec![5],
        };
        assert_eq!(decode(&file), Some(expected));
    }

    #[test]
    fn half_a_journal_is_none() {
        let mut file = Vec::new();
        encode(1, &[1, 2, 3], &mut file);
        for length in 0..file.len() {
            assert_eq!(decode(&file[..length]), None, "{length} bytes");
        }
        file[0] ^= 1;
        assert_eq!(decode(&file), None);
    }
}
