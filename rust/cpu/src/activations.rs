//! Activations in 8 bits: a scale and the sum of the codes for each 32 elements of a row.

use crate::kernels::Path;

/// Elements that share a scale, in weights and activations alike.
pub const GROUP: usize = 32;

/// Groups whose largest magnitude is below this become zero: the reciprocal of their scale would overflow.
const TINY: f32 = 1e-30;

/// 32 elements of a row: `x ≈ scale * code`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Group {
    /// The codes, −127 to 127, four to a word, the first in the lowest byte.
    pub words: [i32; GROUP / 4],
    /// Largest magnitude / 127; NaN or infinite if an element is.
    pub scale: f32,
    /// Sum of the codes.
    pub sum: i32,
}

/// Quantized rows, in bundles of as many as a kernel takes at once.
///
/// A bundle is stored group by group, the rows of the bundle side by side, so that a kernel reads one stream.
#[derive(Debug)]
pub struct Activations {
    groups: Vec<Group>,
    per_row: usize,
    bundle: usize,
}

impl Activations {
    /// Quantize `x`, `[rows, width]` row major; `width` is a positive multiple of 32.
    #[must_use]
    pub fn new(path: Path, x: &[f32], width: usize) -> Self {
        let (per_row, bundle) = (width / GROUP, path.rows());
        let mut groups = vec![Group::default(); x.len() / GROUP];
        let bundles = groups.chunks_mut(per_row * bundle);
        for (x, groups) in x.chunks(width * bundle).zip(bundles) {
            path.quantize(x, x.len() / width, groups);
        }
        Self {
            groups,
            per_row,
            bundle,
        }
    }

    /// Each bundle: its number of rows, and its groups `[per row, rows]`.
    pub fn bundles(&self) -> impl Iterator<Item = (usize, &[Group])> {
        self.groups
            .chunks(self.per_row * self.bundle)
            .map(|groups| (groups.len() / self.per_row, groups))
    }
}

/// The groups `[per row, rows]` of one bundle of `rows` rows: `x` is `[rows, 32 * per row]`.
///
/// Inlined into a function of each instruction set, which makes vectors of it; the result is the same everywhere.
#[inline(always)]
pub(crate) fn quantize(x: &[f32], rows: usize, groups: &mut [Group]) {
    let (values, _) = x.as_chunks::<GROUP>();
    let per_row = values.len() / rows;
    for (row, values) in values.chunks_exact(per_row).enumerate() {
        for (group, values) in groups.iter_mut().skip(row).step_by(rows).zip(values) {
            *group = quantize_group(values);
        }
    }
}

#[inline(always)]
fn quantize_group(values: &[f32; GROUP]) -> Group {
    // Magnitudes order like their bits, and NaN comes last: a bad element makes the scale bad.
    let largest = values
        .iter()
        .fold(0, |max: i32, v| max.max((v.to_bits() & 0x7fff_ffff) as i32));
    let largest = f32::from_bits(largest as u32);
    let (scale, inverse) = if largest <= TINY {
        (0.0, 0.0)
    } else {
        (largest / 127.0, 127.0 / largest)
    };
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa.
    const MAGIC: f32 = 12_582_912.0;
    let mut codes = [0i8; GROUP];
    let mut sum = 0i32;
    for (code, value) in codes.iter_mut().zip(values) {
        let rounded = (value * inverse + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32;
        *code = rounded as i8;
        sum += i32::from(rounded as i8);
    }
    let mut words = [0; GROUP / 4];
    for (word, bytes) in words.iter_mut().zip(codes.as_chunks::<4>().0) {
        *word = i32::from_le_bytes(bytes.map(|code| code as u8));
    }
    Group { words, scale, sum }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(group: &Group) -> Vec<i8> {
        group
            .words
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .map(|byte| byte as i8)
            .collect()
    }

    #[test]
    fn a_code_is_the_nearest_multiple_of_the_scale() {
        let x: Vec<f32> = (0..64)
            .map(|i| ((i * 37) % 61) as f32 * 0.13 - 4.0)
            .collect();
        for path in Path::supported() {
            let rows = Activations::new(path, &x, 64);
            let (_, groups) = rows.bundles().next().unwrap();
            for (group, values) in groups.iter().zip(x.chunks(32)) {
                let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
                assert_eq!(group.scale, largest / 127.0);
                let codes = codes(group);
                for (&code, value) in codes.iter().zip(values) {
                    assert!((f32::from(code) * group.scale - value).abs() <= group.scale * 0.5001);
                }
                assert_eq!(group.sum, codes.iter().map(|&c| i32::from(c)).sum::<i32>());
            }
        }
    }

    #[test]
    fn bundles_hold_the_groups_of_their_rows_side_by_side() {
        let (rows, per_row) = (11, 3);
        // Group `g` of row `r` has the largest element 127 * (10 r + g + 1).
        let x: Vec<f32> = (0..rows * per_row * 32)
            .map(|i| (127 * (10 * (i / 96) + i / 32 % 3 + 1)) as f32)
            .collect();
        for path in Path::supported() {
            let mut first = 0;
            for (count, groups) in Activations::new(path, &x, per_row * 32).bundles() {
                assert!(count <= path.rows());
                for (index, group) in groups.iter().enumerate() {
                    let (row, column) = (first + index % count, index / count);
                    assert_eq!(group.scale, (10 * row + column + 1) as f32);
                }
                first += count;
            }
            assert_eq!(first, rows);
        }
    }

    #[test]
    fn zeros_and_tiny_numbers_become_zero() {
        for value in [0.0, -0.0, 1e-35, f32::MIN_POSITIVE / 4.0] {
            let group = quantize_group(&[value; GROUP]);
            assert_eq!((group.scale, group.sum), (0.0, 0));
            assert_eq!(group.words, [0; 8]);
        }
    }

    #[test]
    fn a_bad_element_makes_the_scale_bad() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0; GROUP];
            values[17] = bad;
            assert!(!quantize_group(&values).scale.is_finite());
        }
    }

    #[test]
    fn the_largest_finite_numbers_stay_finite() {
        let group = quantize_group(&[f32::MAX; GROUP]);
        assert!(group.scale.is_finite());
        assert_eq!(codes(&group), [127; GROUP]);
    }
}
