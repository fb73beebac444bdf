//! The block table of a window group, and which columns of it a query still reads.

use std::collections::VecDeque;

use crate::ids::BlockId;

/// One sequence's blocks of one window group: those of the columns from `first` on. What comes before has left the window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WindowTable {
    first: u32,
    blocks: VecDeque<BlockId>,
}

impl WindowTable {
    /// The blocks of the columns from `first` on.
    pub fn new(first: u32, blocks: impl IntoIterator<Item = BlockId>) -> Self {
        Self {
            first,
            blocks: blocks.into_iter().collect(),
        }
    }

    /// The first column that is held.
    pub fn first(&self) -> u32 {
        self.first
    }

    /// One past the last column.
    pub fn end(&self) -> u32 {
        self.first + self.len()
    }

    /// Columns that are held.
    pub fn len(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Whether no column is held.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The block of a column; none if it is not held.
    pub fn get(&self, column: u32) -> Option<BlockId> {
        let at = column.checked_sub(self.first)?;
        self.blocks.get(at as usize).copied()
    }

    /// All blocks, in the order of their columns, in two parts.
    pub fn parts(&self) -> [&[BlockId]; 2] {
        let (front, back) = self.blocks.as_slices();
        [front, back]
    }

    /// All blocks, in the order of their columns.
    pub fn blocks(&self) -> impl DoubleEndedIterator<Item = BlockId> {
        self.blocks.iter().copied()
    }

    /// Gives the next column a block.
    pub(crate) fn push(&mut self, block: BlockId) {
        self.blocks.push_back(block);
    }

    /// Moves the blocks of all columns before `column` to `out`.
    pub(crate) fn drop_before(&mut self, column: u32, out: &mut Vec<BlockId>) {
        let n = column.saturating_sub(self.first).min(self.len());
        out.extend(self.blocks.drain(..n as usize));
        self.first += n;
    }
}

/// The first column that a query at `position` reads.
pub(crate) fn first_visible(position: u32, window: u32, block_size: u32) -> u32 {
    (position + 1).saturating_sub(window) / block_size
}

/// How many columns before its own a query at the beginning of a column reads.
pub(crate) fn columns_before(window: u32, block_size: u32) -> u32 {
    (window - 1).div_ceil(block_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_reads_the_columns_of_the_positions_above_its_own_minus_the_window() {
        for (block_size, window) in (1..6).flat_map(|size| (1..20).map(move |w| (size, w))) {
            for position in 0..60 {
                let seen = (0..=position)
                    .filter(|&p| i64::from(p) > i64::from(position) - i64::from(window));
                let first = seen.min().map(|p| p / block_size);
                assert_eq!(
                    Some(first_visible(position, window, block_size)),
                    first,
                    "position {position}, window {window}, blocks of {block_size}"
                );
                if position % block_size == 0 {
                    let column = position / block_size;
                    let before = columns_before(window, block_size).min(column);
                    assert_eq!(first, Some(column - before));
                }
            }
        }
    }

    #[test]
    fn a_table_names_its_columns_after_the_first_ones_are_gone() {
        let mut table = WindowTable::new(2, [5, 6, 7].map(BlockId));
        let mut gone = Vec::new();
        table.drop_before(1, &mut gone);
        assert_eq!((gone.len(), table.first(), table.end()), (0, 2, 5));
        table.drop_before(4, &mut gone);
        table.push(BlockId(8));
        assert_eq!(gone, [5, 6].map(BlockId));
        assert_eq!(
            (table.get(3), table.get(4), table.get(5), table.get(6)),
            (None, Some(BlockId(7)), Some(BlockId(8)), None)
        );
        table.drop_before(9, &mut gone);
        assert_eq!(
            (table.first(), table.is_empty()),
            (6, true),
            "columns that were never there are not skipped"
        );
    }
}
