//! What one step computes.

use crate::model::Window;

/// One sequence of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Tokens computed in this step.
    pub query: u32,
    /// Tokens computed before it, whose keys and values are read.
    pub context: u32,
    /// Positions that get logits: 1 for a row that is sampled, 0 for a chunk inside a prompt.
    pub logits: u32,
}

impl Row {
    /// A row that decodes one token.
    pub fn decode(context: u32) -> Self {
        Self {
            query: 1,
            context,
            logits: 1,
        }
    }

    /// A whole prompt, sampled at its end.
    pub fn prefill(tokens: u32) -> Self {
        Self {
            query: tokens,
            context: 0,
            logits: 1,
        }
    }

    /// Pairs of a query and a key that a causal mask leaves.
    fn pairs(&self) -> f64 {
        let (query, context) = (f64::from(self.query), f64::from(self.context));
        query * context + query * (query + 1.0) / 2.0
    }

    /// The same when a query sees `window` tokens at most, itself included.
    fn window_pairs(&self, window: u32) -> f64 {
        // Query i (from 1) sees context + i keys until that reaches the window.
        let growing = window.saturating_sub(self.context).min(self.query);
        let start = Self {
            query: growing,
            ..*self
        };
        start.pairs() + f64::from(self.query - growing) * f64::from(window)
    }

    /// Keys that are read: all for a full layer, those in sight of the first query for a layer with a window.
    fn keys(&self, window: Option<u32>) -> f64 {
        let all = f64::from(self.query) + f64::from(self.context);
        window.map_or(all, |tokens| {
            all.min(f64::from(self.query) + f64::from(tokens) - 1.0)
        })
    }
}

/// A step's rows, summed up; cheap to copy, and rows can be added one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Batch {
    /// Tokens computed.
    pub tokens: f64,
    /// Positions that get logits.
    pub logits: f64,
    /// Query-key pairs of a full layer.
    pub pairs: f64,
    /// Keys read by a full layer.
    pub keys: f64,
    /// Query-key pairs of a layer with a window.
    pub window_pairs: f64,
    /// Keys read by a layer with a window.
    pub window_keys: f64,
}

impl Batch {
    /// The sums of some rows. `window` is the model's.
    pub fn new(rows: impl IntoIterator<Item = Row>, window: Option<Window>) -> Self {
        let mut batch = Self::default();
        for row in rows {
            batch.add(row, window);
        }
        batch
    }

    /// Adds one row.
    pub fn add(&mut self, row: Row, window: Option<Window>) {
        let tokens = window.map(|window| window.tokens);
        self.tokens += f64::from(row.query);
        self.logits += f64::from(row.logits);
        self.pairs += row.pairs();
        self.keys += row.keys(None);
        self.window_pairs += tokens.map_or_else(|| row.pairs(), |tokens| row.window_pairs(tokens));
        self.window_keys += row.keys(tokens);
    }
}
