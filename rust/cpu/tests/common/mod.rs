//! Random matrices in the file's layout, and their naive arithmetic in f64.

use half::f16;
use octavo_cpu::{PackedMatrix, Part, Storage};

/// A small generator (splitmix64), so that shapes and contents come from one seed.
pub(crate) fn random(mut state: u64) -> impl FnMut() -> u64 {
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

fn unit(bits: u64) -> f32 {
    (bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Rows of activations; groups differ in size by up to 2^8.
pub(crate) fn x_rows(rows: usize, width: usize, seed: u64) -> Vec<f32> {
    let mut next = random(seed);
    let mut x = Vec::with_capacity(rows * width);
    while x.len() < rows * width {
        let size = f32::exp2((next() % 9) as f32 - 4.0);
        x.extend((0..32).map(|_| size * unit(next())));
    }
    x
}

/// Parts of blocks as a GGUF file stores them.
pub(crate) struct Matrix {
    parts: Vec<(Storage, usize, Vec<u8>)>,
    pub(crate) width: usize,
}

impl Matrix {
    /// `(storage, rows)` of each part; `groups` blocks in a row.
    pub(crate) fn random(shape: &[(Storage, usize)], groups: usize, seed: u64) -> Self {
        let mut next = random(seed);
        let parts = shape
            .iter()
            .map(|&(storage, rows)| {
                let mut data = Vec::new();
                for _ in 0..rows * groups {
                    let mut block: Vec<u8> =
                        (0..storage.block_bytes()).map(|_| next() as u8).collect();
                    let scale = f16::from_f32(0.02 * unit(next()));
                    block[..2].copy_from_slice(&scale.to_le_bytes());
                    if storage == Storage::Q4_1 {
                        let minimum = f16::from_f32(0.1 * unit(next()));
                        block[2..4].copy_from_slice(&minimum.to_le_bytes());
                    }
                    data.extend(block);
                }
                (storage, rows, data)
            })
            .collect();
        Self {
            parts,
            width: 32 * groups,
        }
    }

    /// Make all bytes of codes `code`.
    pub(crate) fn set_codes(&mut self, code: u8) {
        for (storage, _, data) in &mut self.parts {
            let header = if *storage == Storage::Q4_1 { 4 } else { 2 };
            for block in data.chunks_mut(storage.block_bytes()) {
                block[header..].fill(code);
            }
        }
    }

    pub(crate) fn pack(&self) -> PackedMatrix {
        let parts: Vec<Part<'_>> = self
            .parts
            .iter()
            .map(|(storage, rows, data)| Part {
                storage: *storage,
                rows: *rows,
                data,
            })
            .collect();
        PackedMatrix::new(&parts).unwrap()
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.parts.iter().map(|(.., data)| data.len()).sum()
    }

    /// Element `[row, column]` as GGUF defines it.
    pub(crate) fn element(&self, mut row: usize, column: usize) -> f64 {
        for (storage, rows, data) in &self.parts {
            if row < *rows {
                let bytes = storage.block_bytes();
                let block = &data[(row * self.width / 32 + column / 32) * bytes..][..bytes];
                return block_element(*storage, block, column % 32);
            }
            row -= rows;
        }
        panic!("no such row");
    }

    /// The product with `x`; that of `x` rounded to 8 bits with the sum of its terms' magnitudes; the bound of their difference.
    pub(crate) fn dot(&self, row: usize, x: &[f32]) -> (f64, (f64, f64), f64) {
        let (mut exact, mut rounded, mut size, mut bound) = (0.0, 0.0, 0.0, 0.0);
        for (group, x) in x.chunks(32).enumerate() {
            let largest = x.iter().fold(0f32, |m, v| m.max(v.abs()));
            let step = f64::from(largest) / 127.0;
            for (i, &value) in x.iter().enumerate() {
                let w = self.element(row, 32 * group + i);
                let code = f64::from((value * (127.0 / largest)).round_ties_even());
                exact += w * f64::from(value);
                bound += w.abs() * 0.5001 * step;
                rounded += w * code * step;
                // Codes and minimum are added apart; each is below 0.5 more than the element.
                size += code.abs() * step * (w.abs() + 0.5);
            }
        }
        (exact, (rounded, size), bound + 1e-6 * size)
    }
}

fn block_element(storage: Storage, block: &[u8], i: usize) -> f64 {
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f64();
    let nibble = |header: usize| {
        let byte = block[header + i % 16];
        f64::from(if i < 16 { byte & 15 } else { byte >> 4 })
    };
    match storage {
        Storage::Q4_0 => half(0) * (nibble(2) - 8.0),
        Storage::Q4_1 => half(0) * nibble(4) + half(2),
        Storage::Q8_0 => half(0) * f64::from(block[2 + i] as i8),
    }
}
