//! What the control plane must know about the engine: sizes of the pool, of a step and of the plan.

use thiserror::Error;

/// How a group of layers uses the blocks of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheKind {
    /// Every token of the sequence stays: ordinary attention.
    Full,
}

/// Layers that share one block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheGroup {
    /// Layers of the group.
    pub num_layers: u32,
    /// How they use their blocks.
    pub kind: CacheKind,
    /// Bytes of one block over all layers of the group.
    pub bytes_per_block: u64,
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
    /// Groups of layers over the pool: one full group for now.
    pub groups: Vec<CacheGroup>,
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
    /// A number of cache groups that is not supported.
    #[error("groups has {0} entries; exactly one full group is supported")]
    Groups(usize),
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
            groups: vec![CacheGroup {
                num_layers: 1,
                kind: CacheKind::Full,
                bytes_per_block: 0,
            }],
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
        if self.groups.len() != 1 {
            return Err(ConfigError::Groups(self.groups.len()));
        }
        if self.host_state && self.max_draft_tokens > 0 && self.max_in_flight > 1 {
            return Err(ConfigError::HostStateWithDrafts {
                max_draft_tokens: self.max_draft_tokens,
                max_in_flight: self.max_in_flight,
            });
        }
        Ok(())
    }

    /// Blocks that `tokens` tokens take.
    pub(crate) fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }
}
