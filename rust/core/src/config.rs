//! What the control plane must know about the engine: sizes of the pool, of a step and of the plan.

use thiserror::Error;

/// Layers that share one block table, by what they keep of a sequence. All groups have the same number of layers, so a block has the same
/// bytes whichever group uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheGroup {
    /// Every token stays: ordinary attention.
    Full,
    /// A query at position `p` reads positions above `p - window`; what no query will read any more goes.
    Window {
        /// Positions that a query reads, its own among them.
        window: u32,
    },
}

/// Sizes and switches of an [`Core`](crate::scheduler::Core).
#[derive(Clone, Debug, PartialEq)]
pub struct CoreConfig {
    /// `B`: tokens of a block.
    pub block_size: u32,
    /// Blocks of the pool, the null block among them.
    pub num_blocks: u32,
    /// `S`: rows of a step and slots of the device.
    pub max_num_seqs: u32,
    /// Query tokens of a step at most.
    pub max_num_batched_tokens: u32,
    /// `L`: tokens of a sequence at most, prompt and outputs.
    pub max_model_len: u32,
    /// Steps between their `schedule` and their `commit` at most.
    pub max_in_flight: u32,
    /// `k`: draft tokens of a row at most; 0 switches speculation off.
    pub max_draft_tokens: u32,
    /// Keeps blocks of finished requests for later prompts with the same beginning.
    pub enable_prefix_caching: bool,
    /// Fraction of the blocks that admission leaves free for requests that are running already.
    pub watermark: f32,
    /// `V`: token ids are below it.
    pub vocab_size: u32,
    /// The runner keeps no count of computed tokens of its own: every row's count in the plan is the truth.
    pub host_state: bool,
    /// Groups of layers over the pool: a full one first, then any number with windows.
    pub groups: Vec<CacheGroup>,
    /// Bytes of one block, over the layers of one group.
    pub bytes_per_block: u64,
}

/// A field of [`CoreConfig`] that cannot be used.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ConfigError {
    /// A size outside its bounds.
    #[error("{field} = {value} must be between {min} and {max}")]
    OutOfRange {
        /// Name of the field.
        field: &'static str,
        /// What was given.
        value: u64,
        /// Smallest value allowed.
        min: u64,
        /// Largest value allowed.
        max: u64,
    },
    /// Not a fraction.
    #[error("watermark = {0} must be at least 0 and less than 1")]
    Watermark(f32),
    /// A cache group that cannot stand where it does.
    #[error(
        "groups[{index}] = {given:?}: the first group must be full and each further one have a window of at least 1"
    )]
    Group {
        /// Which one.
        index: usize,
        /// What was given; none if nothing was.
        given: Option<CacheGroup>,
    },
    /// With drafts the host learns the number of computed tokens only at the commit.
    #[error(
        "host_state with max_draft_tokens = {max_draft_tokens} needs max_in_flight = 1, not {max_in_flight}"
    )]
    HostStateWithDrafts {
        /// Drafts of a row.
        max_draft_tokens: u32,
        /// Steps in flight.
        max_in_flight: u32,
    },
}

impl Default for CoreConfig {
    fn default() -> Self {
        Self {
            block_size: 16,
            num_blocks: 1024,
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            max_model_len: 4096,
            max_in_flight: 1,
            max_draft_tokens: 0,
            enable_prefix_caching: true,
            watermark: 0.01,
            vocab_size: 32_000,
            host_state: true,
            groups: vec![CacheGroup::Full],
            bytes_per_block: 0,
        }
    }
}

impl CoreConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// The first field that cannot be used, by name.
    pub fn validate(&self) -> Result<(), ConfigError> {
        const MAX_WORD: u64 = i32::MAX as u64;
        let ranges = [
            ("block_size", self.block_size, 1, 1 << 16),
            ("num_blocks", self.num_blocks, 2, MAX_WORD),
            ("max_num_seqs", self.max_num_seqs, 1, 1 << 16),
            (
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                1,
                1 << 24,
            ),
            ("max_model_len", self.max_model_len, 2, 1 << 24),
            ("max_in_flight", self.max_in_flight, 1, 64),
            ("max_draft_tokens", self.max_draft_tokens, 0, 64),
            ("vocab_size", self.vocab_size, 1, 1 << 24),
        ];
        for (field, value, min, max) in ranges {
            let value = u64::from(value);
            if value < min || value > max {
                return Err(ConfigError::OutOfRange {
                    field,
                    value,
                    min,
                    max,
                });
            }
        }
        if !(0.0..1.0).contains(&self.watermark) {
            return Err(ConfigError::Watermark(self.watermark));
        }
        self.validate_groups()?;
        if self.host_state && self.max_draft_tokens > 0 && self.max_in_flight > 1 {
            return Err(ConfigError::HostStateWithDrafts {
                max_draft_tokens: self.max_draft_tokens,
                max_in_flight: self.max_in_flight,
            });
        }
        Ok(())
    }

    fn validate_groups(&self) -> Result<(), ConfigError> {
        if self.groups.first() != Some(&CacheGroup::Full) {
            return Err(ConfigError::Group {
                index: 0,
                given: self.groups.first().copied(),
            });
        }
        let is_unusable =
            |group: &CacheGroup| !matches!(group, CacheGroup::Window { window } if *window > 0);
        match self.groups[1..].iter().position(is_unusable) {
            Some(position) => Err(ConfigError::Group {
                index: position + 1,
                given: Some(self.groups[position + 1]),
            }),
            None => Ok(()),
        }
    }

    /// Blocks that `tokens` tokens take in one group.
    pub(crate) fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }

    /// Windows of the groups after the first.
    pub(crate) fn windows(&self) -> impl Iterator<Item = u32> {
        windows(&self.groups)
    }

    /// [`blocks_per_request`] of this configuration.
    pub fn blocks_per_request(&self, num_tokens: u32) -> u64 {
        blocks_per_request(
            num_tokens,
            self.block_size,
            &self.groups,
            self.max_num_batched_tokens,
            self.max_in_flight,
        )
    }

    /// The most tokens of a sequence whose KV the pool always has room for; not more than `max_model_len`.
    pub(crate) fn longest_request(&self) -> u32 {
        let num_blocks = u64::from(self.num_blocks - 1);
        let (mut fits, mut end) = (0, self.max_model_len + 1);
        while end - fits > 1 {
            let middle = fits + (end - fits) / 2;
            if self.blocks_per_request(middle) <= num_blocks {
                fits = middle;
            } else {
                end = middle;
            }
        }
        fits
    }
}

fn windows(groups: &[CacheGroup]) -> impl Iterator<Item = u32> {
    groups.iter().filter_map(|group| match group {
        CacheGroup::Full => None,
        CacheGroup::Window { window } => Some(*window),
    })
}

/// The most blocks that one request of `num_tokens` tokens holds at any time: a window's groups keep the window before the oldest step in
/// flight, and what the steps in flight compute. A request that needs more than there are is refused.
///
/// # Panics
/// If `block_size` is 0.
pub fn blocks_per_request(
    num_tokens: u32,
    block_size: u32,
    groups: &[CacheGroup],
    max_num_batched_tokens: u32,
    max_in_flight: u32,
) -> u64 {
    let total = u64::from(num_tokens.div_ceil(block_size));
    let in_flight = u64::from(max_num_batched_tokens) * u64::from(max_in_flight);
    let of_windows: u64 = windows(groups)
        .map(|window| {
            total.min(blocks_touched(
                u64::from(window) - 1 + in_flight,
                block_size,
            ))
        })
        .sum();
    total + of_windows
}

/// The most blocks in which `span` consecutive positions can lie.
pub(crate) fn blocks_touched(span: u64, block_size: u32) -> u64 {
    match span.checked_sub(1) {
        Some(further) => further.div_ceil(u64::from(block_size)) + 1,
        None => 0,
    }
}
