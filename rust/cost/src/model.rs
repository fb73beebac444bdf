//! How many numbers a model has, and how many bytes each of them takes where it is stored.

use crate::machine::Compute;
use crate::{CostError, at_most, positive};

/// Heads of the attention of every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Numbers of one head.
    pub head_dim: u32,
}

/// Layers that see only the last tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// How many of the layers.
    pub layers: u32,
    /// Tokens that a query sees, itself included.
    pub tokens: u32,
}

/// Layers whose feed-forward part is a mixture of experts; [`Model::ffn`] is then the width of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// How many of the layers; the others have one feed-forward part of `dense_ffn`.
    pub layers: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Experts that each token visits.
    pub per_token: u32,
    /// Width of the part that every token visits as well; 0 for none.
    pub shared_ffn: u32,
    /// Width in the layers without experts.
    pub dense_ffn: u32,
}

/// Bytes of one stored number, fractions included: scales count (`Q4_1` is 0.625, `Q8_0` 1.0625).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StorageBytes {
    /// Weights of qkv and output projections.
    pub attention: f64,
    /// Weights of feed-forward parts and routers.
    pub ffn: f64,
    /// Weights of the head.
    pub head: f64,
    /// Weights of the input embedding.
    pub embedding: f64,
    /// Weights of norms.
    pub norm: f64,
    /// Keys and values in the cache.
    pub kv: f64,
    /// Activations between operations; 0 counts as if everything were fused, which is the limit.
    pub activation: f64,
    /// Activations sent to other devices.
    pub message: f64,
}

impl StorageBytes {
    /// The same for everything, activations at no cost.
    pub fn uniform(bytes: f64) -> Self {
        Self {
            attention: bytes,
            ffn: bytes,
            head: bytes,
            embedding: bytes,
            norm: bytes,
            kv: bytes,
            activation: 0.0,
            message: bytes,
        }
    }
}

/// A decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// Layers.
    pub layers: u32,
    /// Numbers of the residual stream.
    pub hidden: u32,
    /// Attention.
    pub attention: Attention,
    /// Width of the feed-forward part (gate and up each), or of one expert.
    pub ffn: u32,
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// The head's weights are the input embedding's.
    pub tied: bool,
    /// Layers with a sliding window.
    pub window: Option<Window>,
    /// Layers with experts.
    pub experts: Option<Experts>,
    /// What a number takes.
    pub bytes: StorageBytes,
    /// Which of the machine's rates the matrix products run at.
    pub compute: Compute,
}

impl Model {
    /// Refuses what cannot be: sizes of 0, parts larger than the whole.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub fn validate(&self) -> Result<(), CostError> {
        positive(&[
            ("layers", f64::from(self.layers)),
            ("hidden", f64::from(self.hidden)),
            ("heads", f64::from(self.attention.heads)),
            ("kv_heads", f64::from(self.attention.kv_heads)),
            ("head_dim", f64::from(self.attention.head_dim)),
            ("ffn", f64::from(self.ffn)),
            ("vocab", f64::from(self.vocab)),
            ("bytes.attention", self.bytes.attention),
            ("bytes.ffn", self.bytes.ffn),
            ("bytes.head", self.bytes.head),
            ("bytes.embedding", self.bytes.embedding),
            ("bytes.norm", self.bytes.norm),
            ("bytes.kv", self.bytes.kv),
            ("bytes.message", self.bytes.message),
            // 0 is allowed here.
            (
                "bytes.activation",
                self.bytes.activation + f64::MIN_POSITIVE,
            ),
        ])?;
        at_most("kv_heads", self.attention.kv_heads, self.attention.heads)?;
        if let Some(window) = self.window {
            at_most("window.layers", window.layers, self.layers)?;
            positive(&[("window.tokens", f64::from(window.tokens))])?;
        }
        if let Some(experts) = self.experts {
            at_most("experts.layers", experts.layers, self.layers)?;
            at_most("experts.per_token", experts.per_token, experts.experts)?;
            positive(&[("experts.per_token", f64::from(experts.per_token))])?;
        }
        Ok(())
    }

    /// Weights of one layer's query, key and value projections.
    pub fn qkv_weights(&self) -> f64 {
        let a = self.attention;
        f64::from(self.hidden) * f64::from(a.head_dim) * f64::from(a.heads + 2 * a.kv_heads)
    }

    /// Weights of one layer's output projection.
    pub fn output_weights(&self) -> f64 {
        f64::from(self.hidden)
            * f64::from(self.attention.heads)
            * f64::from(self.attention.head_dim)
    }

    /// Weights of one matrix of a feed-forward part of some width (there are three: gate, up, down).
    pub(crate) fn ffn_matrix(&self, width: u32) -> f64 {
        f64::from(self.hidden) * f64::from(width)
    }

    /// Weights of the head, and of the input embedding.
    pub fn embedding_weights(&self) -> f64 {
        f64::from(self.hidden) * f64::from(self.vocab)
    }

    /// Weights of all norms: two of each layer and the last one.
    pub fn norm_weights(&self) -> f64 {
        f64::from(self.hidden) * f64::from(2 * self.layers + 1)
    }

    /// Weights of all feed-forward parts and routers.
    pub fn ffn_weights(&self) -> f64 {
        let layers = f64::from(self.layers);
        let Some(e) = self.experts else {
            return 3.0 * layers * self.ffn_matrix(self.ffn);
        };
        let routed = f64::from(e.experts) * self.ffn_matrix(self.ffn);
        let of_layer = 3.0 * (routed + self.ffn_matrix(e.shared_ffn)) + self.ffn_matrix(e.experts);
        f64::from(e.layers) * of_layer
            + 3.0 * f64::from(self.layers - e.layers) * self.ffn_matrix(e.dense_ffn)
    }

    /// All parameters; a tied embedding counts once.
    pub fn parameters(&self) -> f64 {
        let embeddings = if self.tied { 1.0 } else { 2.0 };
        f64::from(self.layers) * (self.qkv_weights() + self.output_weights())
            + self.ffn_weights()
            + self.norm_weights()
            + embeddings * self.embedding_weights()
    }

    /// Bytes of the weights as they are stored.
    pub fn weight_bytes(&self) -> f64 {
        let embedding = if self.tied {
            0.0
        } else {
            self.embedding_weights() * self.bytes.embedding
        };
        f64::from(self.layers) * (self.qkv_weights() + self.output_weights()) * self.bytes.attention
            + self.ffn_weights() * self.bytes.ffn
            + self.norm_weights() * self.bytes.norm
            + self.embedding_weights() * self.bytes.head
            + embedding
    }

    /// Bytes of one token's keys and values in one layer.
    pub fn kv_bytes_per_layer(&self) -> f64 {
        2.0 * f64::from(self.attention.kv_heads)
            * f64::from(self.attention.head_dim)
            * self.bytes.kv
    }

    /// Bytes that one more token takes in the cache of a short sequence (no window is full).
    pub fn kv_bytes_per_token(&self) -> f64 {
        f64::from(self.layers) * self.kv_bytes_per_layer()
    }
}
