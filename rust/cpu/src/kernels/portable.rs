//! Plain Rust, in loops over lanes that compilers turn into vectors.

use crate::activations::Group;
use crate::packed::{Storage, TILE, half_at};

pub(crate) const ROWS: usize = 4;

pub(crate) fn tile(storage: Storage, tile: &[u8], x: &[Group], out: &mut [[f32; TILE]]) {
    let rows = out.len();
    for (row, out) in out.iter_mut().enumerate() {
        *out = [0.0; TILE];
        let header_bytes = 2 * TILE * storage.header_fields();
        let x = x.iter().skip(row).step_by(rows);
        for (x, group) in x.zip(tile.chunks_exact(storage.group_bytes())) {
            let (header, codes) = group.split_at(header_bytes);
            let dots = match storage {
                Storage::Q8_0 => dots_bytes(codes, x),
                Storage::Q4_0 => dots_nibbles(codes, x).map(|dot| dot - 8 * x.sum),
                Storage::Q4_1 => dots_nibbles(codes, x),
            };
            for lane in 0..TILE {
                out[lane] += dots[lane] as f32 * (half_at(header, lane) * x.scale);
                if storage == Storage::Q4_1 {
                    out[lane] += half_at(header, TILE + lane) * (x.scale * x.sum as f32);
                }
            }
        }
    }
}

fn dots_bytes(codes: &[u8], x: &Group) -> [i32; TILE] {
    let mut dots = [0; TILE];
    for (word, x) in codes.chunks_exact(4 * TILE).zip(&x.words) {
        let x = x.to_le_bytes().map(|code| i32::from(code as i8));
        for (dot, code) in dots.iter_mut().zip(word.as_chunks::<4>().0) {
            for i in 0..4 {
                *dot += i32::from(code[i] as i8) * x[i];
            }
        }
    }
    dots
}

/// Word `j` holds elements `4j..4j + 4` in the low halves of its bytes and `16 + 4j..` in the high ones.
fn dots_nibbles(codes: &[u8], x: &Group) -> [i32; TILE] {
    let mut dots = [0; TILE];
    let (low, high) = x.words.split_at(4);
    for ((word, low), high) in codes.chunks_exact(4 * TILE).zip(low).zip(high) {
        let low = low.to_le_bytes().map(|code| i32::from(code as i8));
        let high = high.to_le_bytes().map(|code| i32::from(code as i8));
        for (dot, code) in dots.iter_mut().zip(word.as_chunks::<4>().0) {
            for i in 0..4 {
                *dot += i32::from(code[i] & 15) * low[i] + i32::from(code[i] >> 4) * high[i];
            }
        }
    }
    dots
}
