//! The cost of one step, operation by operation.

use crate::batch::Batch;
use crate::machine::{Compute, Machine};
use crate::model::Model;

/// An operation of a step. All its layers are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Looking up the input embedding.
    Embedding,
    /// All norms.
    Norms,
    /// Query, key and value projections.
    Qkv,
    /// Writing keys and values into the cache.
    KvWrite,
    /// Scores, softmax and the sum of values.
    Attention,
    /// Output projections.
    Output,
    /// Routers of experts.
    Router,
    /// Gate and up projections.
    GateUp,
    /// Down projections.
    Down,
    /// Sums over the devices of a group.
    AllReduce,
    /// The head.
    Head,
}

impl Op {
    /// All, in the order of a step.
    pub const ALL: [Self; 11] = [
        Self::Embedding,
        Self::Norms,
        Self::Qkv,
        Self::KvWrite,
        Self::Attention,
        Self::Output,
        Self::Router,
        Self::GateUp,
        Self::Down,
        Self::AllReduce,
        Self::Head,
    ];
}

/// What an operation, or a step, waits for the longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Reading and writing memory.
    Memory,
    /// Arithmetic.
    Compute,
    /// The other devices.
    Link,
    /// Launching work.
    Overhead,
}

/// What one operation does on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpCost {
    /// Operations; a multiply-add is two.
    pub flops: f64,
    /// Bytes of weights read.
    pub weight_bytes: f64,
    /// Bytes of keys and values read or written.
    pub kv_bytes: f64,
    /// Bytes of activations read and written.
    pub activation_bytes: f64,
    /// Launches.
    pub launches: f64,
    /// Seconds of moving the bytes.
    pub memory_time: f64,
    /// Seconds of arithmetic.
    pub compute_time: f64,
    /// Seconds of talking.
    pub link_time: f64,
    /// Seconds of all launches.
    pub overhead: f64,
}

impl OpCost {
    /// All bytes.
    pub fn bytes(&self) -> f64 {
        self.weight_bytes + self.kv_bytes + self.activation_bytes
    }

    /// Seconds: the longer of memory and arithmetic, then what cannot overlap with it.
    pub fn time(&self) -> f64 {
        self.memory_time.max(self.compute_time) + self.link_time + self.overhead
    }

    /// What takes the longest.
    pub fn bound(&self) -> Bound {
        longest(
            self.memory_time,
            self.compute_time,
            self.link_time,
            self.overhead,
        )
    }
}

fn longest(memory: f64, compute: f64, link: f64, overhead: f64) -> Bound {
    let parts = [
        (Bound::Memory, memory),
        (Bound::Compute, compute),
        (Bound::Link, link),
        (Bound::Overhead, overhead),
    ];
    let (mut bound, mut most) = parts[0];
    for (kind, time) in parts {
        if time > most {
            (bound, most) = (kind, time);
        }
    }
    bound
}

/// The cost of one step on each device of a machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    ops: [OpCost; Op::ALL.len()],
    step_overhead: f64,
    bandwidth: f64,
}

impl StepCost {
    /// Counts a step. Model and machine must have passed their `validate`; an empty batch costs nothing but weights.
    pub fn new(model: &Model, batch: &Batch, machine: &Machine) -> Self {
        let ops = Op::ALL.map(|op| {
            let mut cost = Counter {
                model,
                batch,
                devices: f64::from(machine.devices),
            }
            .count(op);
            // What is not a matrix product runs in 32-bit floats; it never decides.
            let compute = if matches!(op, Op::Norms) {
                Compute::F32
            } else {
                model.compute
            };
            cost.memory_time = cost.bytes() / machine.bandwidth;
            cost.compute_time = cost.flops / machine.rates.of(compute);
            cost.overhead = cost.launches * machine.op_overhead;
            if op == Op::AllReduce {
                let bytes = batch.tokens * f64::from(model.hidden) * model.bytes.message;
                cost.link_time = cost.launches * machine.all_reduce(bytes);
            }
            cost
        });
        Self {
            ops,
            step_overhead: machine.step_overhead,
            bandwidth: machine.bandwidth,
        }
    }

    /// One operation.
    pub fn op(&self, op: Op) -> &OpCost {
        &self.ops[op as usize]
    }

    /// Every operation with its cost, in the order of a step.
    pub fn ops(&self) -> impl Iterator<Item = (Op, &OpCost)> {
        Op::ALL.into_iter().zip(&self.ops)
    }

    fn sum(&self, part: impl Fn(&OpCost) -> f64) -> f64 {
        self.ops.iter().map(part).sum()
    }

    /// Operations of the step.
    pub fn flops(&self) -> f64 {
        self.sum(|op| op.flops)
    }

    /// Bytes of the step.
    pub fn bytes(&self) -> f64 {
        self.sum(OpCost::bytes)
    }

    /// Bytes that no implementation can avoid: weights as they are stored, keys and values.
    pub fn necessary_bytes(&self) -> f64 {
        self.sum(|op| op.weight_bytes + op.kv_bytes)
    }

    /// Seconds of the step.
    pub fn time(&self) -> f64 {
        self.step_overhead + self.sum(OpCost::time)
    }

    /// Seconds without overheads and talk, everything fused: what the best software could reach.
    pub fn limit(&self) -> f64 {
        self.sum(|op| ((op.weight_bytes + op.kv_bytes) / self.bandwidth).max(op.compute_time))
    }

    /// Seconds of the operations that wait for memory, and of those that wait for arithmetic.
    pub fn split(&self) -> (f64, f64) {
        let memory = self.sum(|op| {
            if op.memory_time >= op.compute_time {
                op.memory_time
            } else {
                0.0
            }
        });
        let compute = self.sum(|op| {
            if op.memory_time >= op.compute_time {
                0.0
            } else {
                op.compute_time
            }
        });
        (memory, compute)
    }

    /// Seconds of overheads and talk.
    pub fn fixed(&self) -> f64 {
        self.step_overhead + self.sum(|op| op.overhead + op.link_time)
    }

    /// What the step waits for the longest.
    pub fn bound(&self) -> Bound {
        let (memory, compute) = self.split();
        let overhead = self.step_overhead + self.sum(|op| op.overhead);
        longest(memory, compute, self.sum(|op| op.link_time), overhead)
    }

    /// Memory bandwidth utilisation: necessary bytes per measured second, over the machine's bandwidth.
    pub fn mbu(&self, measured: f64) -> f64 {
        self.necessary_bytes() / (measured * self.bandwidth)
    }

    /// Model FLOPs utilisation: seconds of arithmetic at the machine's rate, over measured seconds.
    pub fn mfu(&self, measured: f64) -> f64 {
        self.sum(|op| op.compute_time) / measured
    }

    /// [`StepCost::limit`] over measured seconds: 1 is the best there can be.
    pub fn fraction_of_limit(&self, measured: f64) -> f64 {
        self.limit() / measured
    }
}

/// Counts one device's part of each operation, before any rate is known.
struct Counter<'a> {
    model: &'a Model,
    batch: &'a Batch,
    devices: f64,
}

impl Counter<'_> {
    fn count(&self, op: Op) -> OpCost {
        let (m, b) = (self.model, self.batch);
        let (layers, hidden) = (f64::from(m.layers), f64::from(m.hidden));
        let heads = f64::from(m.attention.heads) / self.devices;
        // Fewer key-value heads than devices are copied, not split.
        let kv_heads = (f64::from(m.attention.kv_heads) / self.devices).max(1.0);
        let head_dim = f64::from(m.attention.head_dim);
        match op {
            Op::Embedding => OpCost {
                weight_bytes: b.tokens * hidden * m.bytes.embedding,
                activation_bytes: b.tokens * hidden * m.bytes.activation,
                launches: 1.0,
                ..OpCost::default()
            },
            Op::Norms => {
                let norms = 2.0 * layers + 1.0;
                OpCost {
                    // Square, sum, scale by the root, scale by the weight.
                    flops: 4.0 * norms * b.tokens * hidden,
                    weight_bytes: m.norm_weights() * m.bytes.norm,
                    activation_bytes: 2.0 * norms * b.tokens * hidden * m.bytes.activation,
                    launches: norms,
                    ..OpCost::default()
                }
            }
            Op::Qkv => self.product(
                layers,
                hidden,
                (heads + 2.0 * kv_heads) * head_dim,
                b.tokens,
                m.bytes.attention,
            ),
            Op::KvWrite => OpCost {
                kv_bytes: layers * b.tokens * 2.0 * kv_heads * head_dim * m.bytes.kv,
                activation_bytes: layers
                    * b.tokens
                    * 2.0
                    * kv_heads
                    * head_dim
                    * m.bytes.activation,
                launches: layers,
                ..OpCost::default()
            },
            Op::Attention => {
                let windowed = m.window.map_or(0.0, |window| f64::from(window.layers));
                let full = layers - windowed;
                OpCost {
                    // Scores and values, a multiply-add each.
                    flops: 4.0 * heads * head_dim * (full * b.pairs + windowed * b.window_pairs),
                    kv_bytes: 2.0
                        * kv_heads
                        * head_dim
                        * m.bytes.kv
                        * (full * b.keys + windowed * b.window_keys),
                    activation_bytes: 2.0
                        * layers
                        * b.tokens
                        * heads
                        * head_dim
                        * m.bytes.activation,
                    launches: layers,
                    ..OpCost::default()
                }
            }
            Op::Output => self.product(
                layers,
                heads * head_dim,
                hidden,
                b.tokens,
                m.bytes.attention,
            ),
            Op::Router => m.experts.map_or_else(OpCost::default, |experts| {
                let count = f64::from(experts.experts);
                self.product(
                    f64::from(experts.layers),
                    hidden,
                    count,
                    b.tokens,
                    m.bytes.ffn,
                )
            }),
            Op::GateUp => self.feed_forward(|width| (hidden, 2.0 * width)),
            Op::Down => self.feed_forward(|width| (width, hidden)),
            Op::AllReduce if self.devices > 1.0 => OpCost {
                launches: 2.0 * layers,
                ..OpCost::default()
            },
            Op::AllReduce => OpCost::default(),
            Op::Head => self.product(
                1.0,
                hidden,
                f64::from(m.vocab) / self.devices,
                b.logits,
                m.bytes.head,
            ),
        }
    }

    /// `layers` products of `[tokens, inputs]` with `[inputs, outputs]`.
    fn product(&self, layers: f64, inputs: f64, outputs: f64, tokens: f64, bytes: f64) -> OpCost {
        OpCost {
            flops: 2.0 * layers * tokens * inputs * outputs,
            weight_bytes: layers * inputs * outputs * bytes,
            activation_bytes: layers * tokens * (inputs + outputs) * self.model.bytes.activation,
            launches: layers,
            ..OpCost::default()
        }
    }

    /// One matrix of the feed-forward parts; `shape` gives its inputs and outputs for a width on this device.
    fn feed_forward(&self, shape: impl Fn(f64) -> (f64, f64)) -> OpCost {
        let (m, tokens) = (self.model, self.batch.tokens);
        let part = |layers: u32, width: u32| {
            let (inputs, outputs) = shape(f64::from(width) / self.devices);
            self.product(f64::from(layers), inputs, outputs, tokens, m.bytes.ffn)
        };
        let Some(experts) = m.experts else {
            return part(m.layers, m.ffn);
        };
        let mut routed = part(experts.layers, m.ffn);
        routed.flops *= f64::from(experts.per_token);
        routed.activation_bytes *= f64::from(experts.per_token);
        routed.weight_bytes *= visited_experts(
            f64::from(experts.experts),
            f64::from(experts.per_token),
            tokens,
        );
        let shared = part(
            if experts.shared_ffn > 0 {
                experts.layers
            } else {
                0
            },
            experts.shared_ffn,
        );
        let dense = part(m.layers - experts.layers, experts.dense_ffn);
        let sum = |field: fn(&OpCost) -> f64| field(&routed) + field(&shared) + field(&dense);
        OpCost {
            flops: sum(|cost| cost.flops),
            weight_bytes: sum(|cost| cost.weight_bytes),
            activation_bytes: sum(|cost| cost.activation_bytes),
            launches: sum(|cost| cost.launches),
            ..OpCost::default()
        }
    }
}

/// Experts of a layer that at least one of `tokens` visits, if each visits `per_token` of them at random.
fn visited_experts(experts: f64, per_token: f64, tokens: f64) -> f64 {
    experts * (1.0 - (1.0 - per_token / experts).powf(tokens))
}
