//! AVX2: a tile is two vectors of 8 lanes; bytes are multiplied and added in pairs (`vpmaddubsw`).
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use crate::activations::{self, Group};
use crate::packed::{Storage, TILE};

pub(crate) const ROWS: usize = 4;

pub(crate) fn is_supported() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

pub(crate) fn quantize(x: &[f32], rows: usize, groups: &mut [Group]) {
    assert!(is_supported());
    // SAFETY: the processor has the features.
    unsafe { quantize_vectors(x, rows, groups) }
}

#[target_feature(enable = "avx2")]
fn quantize_vectors(x: &[f32], rows: usize, groups: &mut [Group]) {
    activations::quantize(x, rows, groups);
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
            count => unreachable!("{count} rows, at most {ROWS}"),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rows<const M: usize>(storage: Storage, tile: &[u8], x: &[Group], out: &mut [[f32; TILE]]) {
    let (x, _) = x.as_chunks::<M>();
    let sums = match storage {
        Storage::Q4_0 => nibbles::<M, false>(tile, x),
        Storage::Q4_1 => nibbles::<M, true>(tile, x),
        Storage::Q8_0 => bytes::<M>(tile, x),
    };
    for (out, sums) in out.iter_mut().zip(sums) {
        let (low, high) = out.split_at_mut(8);
        // SAFETY: both halves are 8 floats; the store needs no alignment.
        unsafe {
            _mm256_storeu_ps(low.as_mut_ptr(), sums[0]);
            _mm256_storeu_ps(high.as_mut_ptr(), sums[1]);
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8], at: usize) -> __m256i {
    let bytes = &bytes[at..at + 32];
    // SAFETY: 32 bytes are there; the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Eight f16 numbers as fp32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_halves(bytes: &[u8], at: usize) -> __m256 {
    let bytes = &bytes[at..at + 16];
    // SAFETY: 16 bytes are there; the load needs no alignment.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
}

/// `Q4_1` if `MIN`, else `Q4_0`.
///
/// A sum of 16 products of a code up to 15 and one of ±127 is at most 30,480, so a whole group is added in 16 bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn nibbles<const M: usize, const MIN: bool>(tile: &[u8], x: &[[Group; M]]) -> [[__m256; 2]; M] {
    let storage = const { if MIN { Storage::Q4_1 } else { Storage::Q4_0 } };
    let header = 2 * TILE * storage.header_fields();
    let (mask, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let mut sums = [[_mm256_setzero_ps(); 2]; M];
    for (x, group) in x.iter().zip(tile.chunks_exact(storage.group_bytes())) {
        let mut pairs = [[_mm256_setzero_si256(); 2]; M];
        for word in 0..4 {
            let codes = [0, 32].map(|at| load(group, header + 64 * word + at));
            let low = codes.map(|codes| _mm256_and_si256(codes, mask));
            let high = codes.map(|codes| _mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask));
            for row in 0..M {
                let x_low = _mm256_set1_epi32(x[row].words[word]);
                let x_high = _mm256_set1_epi32(x[row].words[word + 4]);
                for half in 0..2 {
                    let sum = &mut pairs[row][half];
                    *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(low[half], x_low));
                    *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(high[half], x_high));
                }
            }
        }
        for half in 0..2 {
            let scale = load_halves(group, 16 * half);
            for row in 0..M {
                let x = &x[row];
                let mut dots = _mm256_madd_epi16(pairs[row][half], ones);
                if !MIN {
                    dots = _mm256_sub_epi32(dots, _mm256_set1_epi32(8 * x.sum));
                }
                let scale = _mm256_mul_ps(scale, _mm256_set1_ps(x.scale));
                let mut sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, sums[row][half]);
                if MIN {
                    let minimum = load_halves(group, 2 * TILE + 16 * half);
                    let x = _mm256_set1_ps(x.scale * x.sum as f32);
                    sum = _mm256_fmadd_ps(minimum, x, sum);
                }
                sums[row][half] = sum;
            }
        }
    }
    sums
}

/// `Q8_0`. The multiplication takes one unsigned factor, so the sign of a weight moves to the activation.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn bytes<const M: usize>(tile: &[u8], x: &[[Group; M]]) -> [[__m256; 2]; M] {
    let ones = _mm256_set1_epi16(1);
    let mut sums = [[_mm256_setzero_ps(); 2]; M];
    let groups = tile.chunks_exact(const { Storage::Q8_0.group_bytes() });
    for (x, group) in x.iter().zip(groups) {
        let mut dots = [[_mm256_setzero_si256(); 2]; M];
        for word in 0..8 {
            let codes = [0, 32].map(|at| load(group, 2 * TILE + 64 * word + at));
            let magnitudes = codes.map(|codes| _mm256_abs_epi8(codes));
            for row in 0..M {
                let x = _mm256_set1_epi32(x[row].words[word]);
                for half in 0..2 {
                    // At most 2 * 128 * 127, below 2^15.
                    let signed = _mm256_sign_epi8(x, codes[half]);
                    let pairs = _mm256_maddubs_epi16(magnitudes[half], signed);
                    let dot = _mm256_madd_epi16(pairs, ones);
                    dots[row][half] = _mm256_add_epi32(dots[row][half], dot);
                }
            }
        }
        let scales = [0, 16].map(|at| load_halves(group, at));
        for row in 0..M {
            let x_scale = _mm256_set1_ps(x[row].scale);
            for half in 0..2 {
                let scale = _mm256_mul_ps(scales[half], x_scale);
                let dot = _mm256_cvtepi32_ps(dots[row][half]);
                sums[row][half] = _mm256_fmadd_ps(dot, scale, sums[row][half]);
            }
        }
    }
    sums
}
