//! `out = x · weightᵀ` of a packed matrix.
//!
//! Activations are rounded to 8 bits in groups of 32, products of codes are summed exactly in integers within a group, and groups are
//! added in fp32 from the first to the last. So a row of the result depends on its row of `x` and the instruction set only: not on
//! how many rows come with it, nor on the threads.

use std::ops::Range;

use crate::activations::Activations;
use crate::kernels::{MAX_ROWS, Path};
use crate::packed::{PackedMatrix, Segment, TILE};
use crate::pool;

/// Weight bytes times rows of `x` that are worth waking a thread for.
const MIN_WORK: usize = 64 << 10;
/// Chunks per thread at most, so that threads end together and splitting stays cheap.
const CHUNKS_PER_THREAD: usize = 8;
/// Rows of `x` that one pass over the weights serves: their codes stay in the second-level cache.
const ROW_BLOCK: usize = 128;

/// An argument that does not fit the others.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// Not whole rows.
    #[error("x: {len} elements are not rows of {width}")]
    X {
        /// Its elements.
        len: usize,
        /// Elements of a row.
        width: usize,
    },
    /// Another size than `[rows of x, out]`.
    #[error("out: {len} elements, expected {expected}")]
    Out {
        /// Its elements.
        len: usize,
        /// Elements of the result.
        expected: usize,
    },
    /// Another size than `x`.
    #[error("residual: {len} elements, expected {expected}")]
    Residual {
        /// Its elements.
        len: usize,
        /// Those of `x`.
        expected: usize,
    },
    /// Not a row.
    #[error("ids: {id} is not one of {rows} rows")]
    Id {
        /// The id.
        id: i64,
        /// `out` of the matrix.
        rows: usize,
    },
}

/// Some tiles of a segment for some rows of `x`.
struct Job<'a> {
    segment: &'a Segment,
    tiles: Range<usize>,
    x: &'a Activations,
    /// For each row of `x`, the part of its result that these tiles make.
    out: Vec<&'a mut [f32]>,
}

impl PackedMatrix {
    /// `out = x · selfᵀ` with `x` `[M, in]` and `out` `[M, out]`, both row major, on at most `threads` threads.
    ///
    /// # Errors
    /// [`ShapeError`] if a length does not fit; `out` is unchanged then.
    pub fn linear(&self, x: &[f32], out: &mut [f32], threads: usize) -> Result<(), ShapeError> {
        self.linear_with(Path::best(), x, out, threads)
    }

    /// [`PackedMatrix::linear`] with a given instruction set.
    ///
    /// # Errors
    /// As `linear`.
    pub fn linear_with(
        &self,
        path: Path,
        x: &[f32],
        out: &mut [f32],
        threads: usize,
    ) -> Result<(), ShapeError> {
        let (width, columns) = (self.width(), self.rows());
        let rows = x.len() / width;
        if rows * width != x.len() {
            return Err(ShapeError::X {
                len: x.len(),
                width,
            });
        }
        if out.len() != rows * columns {
            return Err(ShapeError::Out {
                len: out.len(),
                expected: rows * columns,
            });
        }
        let blocks: Vec<Activations> = x
            .chunks(ROW_BLOCK * width)
            .map(|block| Activations::new(path, block, width))
            .collect();
        let outs = out.chunks_mut(ROW_BLOCK * columns);
        let mut jobs = Vec::new();
        for (x, out) in blocks.iter().zip(outs) {
            self.split(x, out, threads, &mut jobs);
        }
        pool::for_each(jobs, threads, |job| job.run(path));
        Ok(())
    }

    /// Cut one block of rows into jobs.
    fn split<'a>(
        &'a self,
        x: &'a Activations,
        out: &'a mut [f32],
        threads: usize,
        jobs: &mut Vec<Job<'a>>,
    ) {
        let mut rest: Vec<&mut [f32]> = out.chunks_mut(self.rows()).collect();
        let rows = rest.len();
        for segment in &self.segments {
            let tiles = segment.num_tiles();
            let chunk = if threads > 1 {
                let worth = MIN_WORK.div_ceil(segment.tile_bytes() * rows);
                worth.max(tiles.div_ceil(CHUNKS_PER_THREAD * threads))
            } else {
                tiles
            };
            for start in (0..tiles).step_by(chunk) {
                let stop = (start + chunk).min(tiles);
                let columns = (stop * TILE).min(segment.rows) - start * TILE;
                let out = rest
                    .iter_mut()
                    .map(|row| {
                        let (head, tail) = std::mem::take(row).split_at_mut(columns);
                        *row = tail;
                        head
                    })
                    .collect();
                jobs.push(Job {
                    segment,
                    tiles: start..stop,
                    x,
                    out,
                });
            }
        }
    }
}

impl Job<'_> {
    fn run(mut self, path: Path) {
        let mut sums = [[0.0; TILE]; MAX_ROWS];
        let mut column = 0;
        for tile in self.tiles {
            let weights = self.segment.tile(tile);
            let mut rest = self.out.as_mut_slice();
            for (rows, x) in self.x.bundles() {
                let (out, tail) = std::mem::take(&mut rest).split_at_mut(rows);
                rest = tail;
                let sums = &mut sums[..rows];
                path.tile(self.segment.storage, weights, x, sums);
                for (out, sums) in out.iter_mut().zip(sums) {
                    let out = &mut out[column..];
                    let columns = out.len().min(TILE);
                    out[..columns].copy_from_slice(&sums[..columns]);
                }
            }
            column += TILE;
        }
    }
}
