//! Models whose sizes are public, and the machine they were measured on.
#![allow(dead_code, missing_docs, unreachable_pub)]

use octavo_cost::{Attention, Compute, Experts, Link, Machine, Model, Rates, StorageBytes};

pub fn llama3_8b() -> Model {
    Model {
        layers: 32,
        hidden: 4096,
        attention: Attention {
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
        },
        ffn: 14_336,
        vocab: 128_256,
        tied: false,
        window: None,
        experts: None,
        bytes: StorageBytes::uniform(2.0),
        compute: Compute::Bf16,
    }
}

pub fn llama3_70b() -> Model {
    let attention = Attention {
        heads: 64,
        kv_heads: 8,
        head_dim: 128,
    };
    Model {
        layers: 80,
        hidden: 8192,
        attention,
        ffn: 28_672,
        ..llama3_8b()
    }
}

pub fn mixtral_8x7b() -> Model {
    let experts = Experts {
        layers: 32,
        experts: 8,
        per_token: 2,
        shared_ffn: 0,
        dense_ffn: 0,
    };
    Model {
        vocab: 32_000,
        experts: Some(experts),
        ..llama3_8b()
    }
}

/// SmolLM2-135M as its `Q4_1` file stores it: 5 bits a layer weight, `Q8_0` embedding and head, float norms.
pub fn smollm2_q4_1() -> Model {
    Model {
        layers: 30,
        hidden: 576,
        attention: Attention {
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
        },
        ffn: 1536,
        vocab: 49_152,
        tied: true,
        window: None,
        experts: None,
        bytes: StorageBytes {
            attention: 0.625,
            ffn: 0.625,
            head: 1.0625,
            embedding: 1.0625,
            norm: 4.0,
            kv: 4.0,
            activation: 0.0,
            message: 4.0,
        },
        compute: Compute::Int8,
    }
}

/// One H200 as measured: reads 4.25 TB/s, multiplies 750 TFLOP/s in bf16 and 1,200 in fp8.
pub fn h200() -> Machine {
    Machine::ideal(
        4.25e12,
        Rates {
            f32: 60e12,
            bf16: 750e12,
            fp8: 1_200e12,
            int8: 1_200e12,
        },
    )
}

/// Two of them over NVLink.
pub fn two_h200() -> Machine {
    Machine {
        devices: 2,
        link: Link {
            bandwidth: 355e9,
            latency: 6.5e-6,
        },
        ..h200()
    }
}

/// Relative closeness.
pub fn close(got: f64, wanted: f64, relative: f64) -> bool {
    (got - wanted).abs() <= relative * wanted.abs()
}
