//! One tile of weights times a few rows of activations, for each instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use crate::activations::Group;
use crate::packed::{Storage, TILE};

/// Rows of `x` that a kernel takes at once, at most.
pub(crate) const MAX_ROWS: usize = 8;

/// An instruction set that this processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Path {
    /// The fastest one.
    #[must_use]
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if avx512::is_supported() {
                return Self(Kind::Avx512Vnni);
            }
            if avx2::is_supported() {
                return Self(Kind::Avx2);
            }
        }
        Self(Kind::Portable)
    }

    /// All of them, the fastest first.
    #[must_use]
    pub fn supported() -> Vec<Self> {
        let mut paths = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if avx512::is_supported() {
                paths.push(Self(Kind::Avx512Vnni));
            }
            if avx2::is_supported() {
                paths.push(Self(Kind::Avx2));
            }
        }
        paths.push(Self(Kind::Portable));
        paths
    }

    /// Rows of `x` that share a load of the weights.
    pub(crate) fn rows(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni => avx512::ROWS,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => avx2::ROWS,
            Kind::Portable => portable::ROWS,
        }
    }

    /// The groups `[per row, rows]` of `x`, `[rows, 32 * per row]`.
    pub(crate) fn quantize(self, x: &[f32], rows: usize, groups: &mut [Group]) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni | Kind::Avx2 => avx2::quantize(x, rows, groups),
            Kind::Portable => crate::activations::quantize(x, rows, groups),
        }
    }

    /// `out[r][lane]`, the product of row `r` of `x` and row `lane` of `tile`.
    ///
    /// `out` has a row for each row of `x`, at most [`Path::rows`]; `x` is `[groups, rows]`.
    ///
    /// The terms of a row are added in the same order for any number of rows.
    pub(crate) fn tile(self, storage: Storage, tile: &[u8], x: &[Group], out: &mut [[f32; TILE]]) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni => avx512::tile(storage, tile, x, out),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => avx2::tile(storage, tile, x, out),
            Kind::Portable => portable::tile(storage, tile, x, out),
        }
    }
}
