//! The ids of pieces of text seen before: most words of a text are not new.

use std::collections::HashMap;
use std::sync::Mutex;

/// Pieces that one cache holds, of at most [`MAX_PIECE_BYTES`] each, before it begins anew.
pub(super) const MAX_PIECES: usize = 16_384;
const MAX_PIECE_BYTES: usize = 48;

#[derive(Debug, Default)]
pub(super) struct PieceCache {
    /// Where in `ids` those of a piece are.
    pieces: HashMap<Box<str>, (u32, u32)>,
    ids: Vec<u32>,
}

impl PieceCache {
    pub(super) fn get(&self, piece: &str) -> Option<&[u32]> {
        let &(start, end) = self.pieces.get(piece)?;
        Some(&self.ids[start as usize..end as usize])
    }

    /// Keeps the ids of a piece that is not known yet, unless it is long.
    pub(super) fn insert(&mut self, piece: &str, ids: &[u32]) {
        if piece.len() > MAX_PIECE_BYTES {
            return;
        }
        if self.pieces.len() >= MAX_PIECES {
            self.pieces.clear();
            self.ids.clear();
        }
        let start = self.ids.len() as u32;
        self.ids.extend_from_slice(ids);
        self.pieces
            .insert(piece.into(), (start, self.ids.len() as u32));
    }
}

/// Values of which each thread that encodes borrows one; as many as threads have encoded at one time.
#[derive(Debug)]
pub(super) struct Pool<T>(Mutex<Vec<T>>);

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Pool<T> {
    pub(super) fn take(&self) -> Option<T> {
        self.0.lock().ok()?.pop()
    }

    pub(super) fn give_back(&self, value: T) {
        if let Ok(mut values) = self.0.lock() {
            values.push(value);
        }
    }
}
