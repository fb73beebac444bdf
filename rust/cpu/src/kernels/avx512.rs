//! AVX-512 with VNNI: a tile is one vector of 16 lanes; four products of bytes go to a lane at once (`vpdpbusd`).
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::avx2;
use crate::activations::Group;
use crate::packed::{Storage, TILE};

pub(crate) const ROWS: usize = 8;

pub(crate) fn is_supported() -> bool {
    avx2::is_supported()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vnni")
}

pub(crate) fn tile(storage: Storage, tile: &[u8], x: &[Group], out: &mut [[f32; TILE]]) {
    assert!(is_supported());
    // SAFETY: the processor has the features.
    unsafe {
        match out.len() {
            1 => rows::<1>(storage, tile, x, out),
            2 => rows::<2>(storage, tile, x, out),
            3 => rows::<3>(storage, tile, x, out),
            4 => rows::<4>(storage, tile, x, out),
            5 => rows::<5>(storage, tile, x, out),
            6 => rows::<6>(storage, tile, x, out),
            7 => rows::<7>(storage, tile, x, out),
            8 => rows::<8>(storage, tile, x, out),
            count => unreachable!("{count} rows, at most {ROWS}"),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn rows<const M: usize>(storage: Storage, tile: &[u8], x: &[Group], out: &mut [[f32; TILE]]) {
    let (x, _) = x.as_chunks::<M>();
    let sums = match storage {
        Storage::Q4_0 => nibbles::<M, false>(tile, x),
        Storage::Q4_1 => nibbles::<M, true>(tile, x),
        Storage::Q8_0 => bytes::<M>(tile, x),
    };
    for (out, sums) in out.iter_mut().zip(sums) {
        // SAFETY: `out` is 16 floats; the store needs no alignment.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sums) }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8], at: usize) -> __m512i {
    let bytes = &bytes[at..at + 64];
    // SAFETY: 64 bytes are there; the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// Sixteen f16 numbers as fp32.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_halves(bytes: &[u8], at: usize) -> __m512 {
    let bytes = &bytes[at..at + 32];
    // SAFETY: 32 bytes are there; the load needs no alignment.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) })
}

/// `Q4_1` if `MIN`, else `Q4_0`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn nibbles<const M: usize, const MIN: bool>(tile: &[u8], x: &[[Group; M]]) -> [__m512; M] {
    let storage = const { if MIN { Storage::Q4_1 } else { Storage::Q4_0 } };
    let header = 2 * TILE * storage.header_fields();
    let mask = _mm512_set1_epi8(15);
    let mut sums = [_mm512_setzero_ps(); M];
    for (x, group) in x.iter().zip(tile.chunks_exact(storage.group_bytes())) {
        let mut dots = [_mm512_setzero_si512(); M];
        for word in 0..4 {
            let codes = load(group, header + 64 * word);
            let low = _mm512_and_si512(codes, mask);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), mask);
            for row in 0..M {
                let x = &x[row].words;
                let dot = _mm512_dpbusd_epi32(dots[row], low, _mm512_set1_epi32(x[word]));
                dots[row] = _mm512_dpbusd_epi32(dot, high, _mm512_set1_epi32(x[word + 4]));
            }
        }
        let scale = load_halves(group, 0);
        for row in 0..M {
            let x = &x[row];
            let mut dot = dots[row];
            if !MIN {
                dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(8 * x.sum));
            }
            let scale = _mm512_mul_ps(scale, _mm512_set1_ps(x.scale));
            let mut sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sums[row]);
            if MIN {
                let minimum = load_halves(group, 2 * TILE);
                let x = _mm512_set1_ps(x.scale * x.sum as f32);
                sum = _mm512_fmadd_ps(minimum, x, sum);
            }
            sums[row] = sum;
        }
    }
    sums
}

/// `Q8_0`. The multiplication takes one unsigned factor, so codes are raised by 128 and 128 times the activations' sum is taken off.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn bytes<const M: usize>(tile: &[u8], x: &[[Group; M]]) -> [__m512; M] {
    let sign = _mm512_set1_epi8(i8::MIN);
    let mut sums = [_mm512_setzero_ps(); M];
    let groups = tile.chunks_exact(const { Storage::Q8_0.group_bytes() });
    for (x, group) in x.iter().zip(groups) {
        let mut dots = [_mm512_setzero_si512(); M];
        for word in 0..8 {
            let codes = _mm512_xor_si512(load(group, 2 * TILE + 64 * word), sign);
            for row in 0..M {
                let x = _mm512_set1_epi32(x[row].words[word]);
                dots[row] = _mm512_dpbusd_epi32(dots[row], codes, x);
            }
        }
        let scale = load_halves(group, 0);
        for row in 0..M {
            let x = &x[row];
            let dot = _mm512_sub_epi32(dots[row], _mm512_set1_epi32(128 * x.sum));
            let scale = _mm512_mul_ps(scale, _mm512_set1_ps(x.scale));
            sums[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sums[row]);
        }
    }
    sums
}
