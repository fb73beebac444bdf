//! A cursor over bytes that never reads past their end and never trusts a length.

use super::error::{GgufError, What};

/// A little-endian cursor; every method either advances inside the bytes or returns an error.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    pub(super) fn offset(&self) -> u64 {
        self.position as u64
    }

    pub(super) fn remaining(&self) -> u64 {
        (self.bytes.len() - self.position) as u64
    }

    /// Fails unless `count` items of at least `min_bytes` each can follow.
    pub(super) fn check_count(
        &self,
        what: What<'_>,
        count: u64,
        min_bytes: u64,
    ) -> Result<(), GgufError> {
        let limit = self.remaining() / min_bytes;
        if count <= limit {
            return Ok(());
        }
        Err(GgufError::CountTooLarge {
            what: what.to_string(),
            offset: self.offset(),
            count,
            limit,
            available: self.remaining(),
        })
    }

    pub(super) fn take(&mut self, what: What<'_>, len: u64) -> Result<&'a [u8], GgufError> {
        if len > self.remaining() {
            return Err(GgufError::Truncated {
                what: what.to_string(),
                offset: self.offset(),
                needed: len,
                available: self.remaining(),
            });
        }
        let start = self.position;
        self.position += len as usize;
        Ok(&self.bytes[start..self.position])
    }

    pub(super) fn array<const N: usize>(&mut self, what: What<'_>) -> Result<[u8; N], GgufError> {
        let bytes = self.take(what, N as u64)?;
        Ok(bytes
            .try_into()
            .expect("invariant: take returns as many bytes as asked for"))
    }

    pub(super) fn u32(&mut self, what: What<'_>) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: What<'_>) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A string: its length as `u64`, then UTF-8 without a terminator.
    pub(super) fn string(&mut self, what: What<'_>) -> Result<&'a str, GgufError> {
        let len = self.u64(what)?;
        let offset = self.offset();
        let bytes = self.take(what, len)?;
        std::str::from_utf8(bytes).map_err(|_| GgufError::NotUtf8 {
            what: what.to_string(),
            offset,
        })
    }
}
