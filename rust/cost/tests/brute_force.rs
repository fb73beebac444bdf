//! Small steps counted multiply by multiply, and properties that hold for every step.
#![allow(clippy::unwrap_used)]

mod common;

use common::close;
use octavo_cost::{
    Attention, Batch, Compute, Experts, Machine, Model, Op, Rates, Row, StepCost, StorageBytes,
    Window,
};
use proptest::prelude::*;

prop_compose! {
    fn models()(
        layers in 1_u32..4, hidden in 1_u32..9, kv_heads in 1_u32..3, group in 1_u32..3, head_dim in 1_u32..5, ffn in 1_u32..9,
        vocab in 1_u32..9, tied: bool, window in prop::option::of((0_u32..4, 1_u32..12)), moe in prop::option::of((0_u32..4, 1_u32..5, 1_u32..5, 0_u32..4)),
        bytes in 0.5_f64..4.0, activation in prop_oneof![Just(0.0), Just(2.0)],
    ) -> Model {
        Model {
            layers, hidden, ffn, vocab, tied,
            attention: Attention { heads: kv_heads * group, kv_heads, head_dim },
            window: window.map(|(count, tokens)| Window { layers: count.min(layers), tokens }),
            experts: moe.map(|(count, experts, per_token, shared_ffn)| Experts {
                layers: count.min(layers), experts, per_token: per_token.min(experts), shared_ffn, dense_ffn: 3,
            }),
            bytes: StorageBytes { activation, ..StorageBytes::uniform(bytes) },
            compute: Compute::Bf16,
        }
    }
}

fn rows() -> impl Strategy<Value = Vec<Row>> {
    prop::collection::vec((1_u32..20, 0_u32..20, 0_u32..3), 1..5).prop_map(|rows| {
        rows.into_iter()
            .map(|(query, context, logits)| Row {
                query,
                context,
                logits,
            })
            .collect()
    })
}

fn machine() -> Machine {
    Machine {
        op_overhead: 1e-3,
        step_overhead: 0.1,
        ..Machine::ideal(1e3, Rates::uniform(1e4))
    }
}

fn cost(model: &Model, rows: &[Row]) -> StepCost {
    model.validate().unwrap();
    StepCost::new(
        model,
        &Batch::new(rows.iter().copied(), model.window),
        &machine(),
    )
}

/// Multiply-adds of attention and the keys read, by walking over every query and key.
fn attention(model: &Model, rows: &[Row]) -> (u64, u64) {
    let (mut pairs, mut keys) = (0, 0);
    for layer in 0..model.layers {
        let window = model
            .window
            .filter(|window| layer < window.layers)
            .map_or(u32::MAX, |window| window.tokens);
        for row in rows {
            let mut read = std::collections::HashSet::new();
            for query in row.context..row.context + row.query {
                for key in (0..=query).filter(|key| query - key < window) {
                    pairs += 1;
                    read.insert(key);
                }
            }
            keys += read.len() as u64;
        }
    }
    (pairs, keys)
}

/// Multiply-adds of a product, one by one.
fn product(tokens: u32, inputs: u32, outputs: u32) -> u64 {
    (0..tokens)
        .flat_map(|_| 0..inputs)
        .map(|_| u64::from(outputs))
        .sum()
}

proptest! {
    #[test]
    fn operations_are_those_of_walking_over_every_number(model in models(), rows in rows()) {
        let step = cost(&model, &rows);
        let Attention { heads, kv_heads, head_dim } = model.attention;
        let tokens: u32 = rows.iter().map(|row| row.query).sum();
        let logits: u32 = rows.iter().map(|row| row.logits).sum();
        let (pairs, keys) = attention(&model, &rows);
        let mut adds = std::collections::HashMap::new();
        for layer in 0..model.layers {
            *adds.entry(Op::Qkv).or_default() += product(tokens, model.hidden, (heads + 2 * kv_heads) * head_dim);
            *adds.entry(Op::Output).or_default() += product(tokens, heads * head_dim, model.hidden);
            let widths = match model.experts {
                Some(e) if layer < e.layers => {
                    *adds.entry(Op::Router).or_default() += product(tokens, model.hidden, e.experts);
                    [vec![model.ffn; e.per_token as usize], vec![e.shared_ffn]].concat()
                }
                Some(e) => vec![e.dense_ffn],
                None => vec![model.ffn],
            };
            for width in widths {
                *adds.entry(Op::GateUp).or_default() += 2 * product(tokens, model.hidden, width);
                *adds.entry(Op::Down).or_default() += product(tokens, width, model.hidden);
            }
        }
        adds.insert(Op::Head, product(logits, model.hidden, model.vocab));
        adds.insert(Op::Attention, 2 * pairs * u64::from(heads * head_dim));
        for op in [Op::Qkv, Op::Output, Op::Router, Op::GateUp, Op::Down, Op::Head, Op::Attention] {
            let wanted = 2.0 * *adds.get(&op).unwrap_or(&0) as f64;
            prop_assert!(close(step.op(op).flops, wanted, 1e-12), "{:?} {} {}", op, step.op(op).flops, wanted);
        }
        let kv = f64::from(2 * kv_heads * head_dim) * model.bytes.kv;
        prop_assert!(close(step.op(Op::Attention).kv_bytes, keys as f64 * kv, 1e-12));
        prop_assert!(close(step.op(Op::KvWrite).kv_bytes, f64::from(tokens * model.layers) * kv, 1e-12));
    }

    #[test]
    fn a_step_reads_each_weight_once_but_for_unvisited_experts_and_the_embedding(model in models(), rows in rows()) {
        let step = cost(&model, &rows);
        let read: f64 = step.ops().filter(|(op, _)| *op != Op::Embedding).map(|(_, cost)| cost.weight_bytes).sum();
        let embedding = if model.tied { 0.0 } else { model.embedding_weights() * model.bytes.embedding };
        let stored = model.weight_bytes() - embedding;
        prop_assert!(read <= stored * (1.0 + 1e-12), "{} {}", read, stored);
        if model.experts.is_none_or(|experts| experts.layers == 0 || experts.per_token == experts.experts) {
            prop_assert!(close(read, stored, 1e-12), "{} {}", read, stored);
        }
    }

    #[test]
    fn time_is_the_longer_of_memory_and_arithmetic_of_each_operation_and_all_overheads(model in models(), rows in rows()) {
        let step = cost(&model, &rows);
        let wanted: f64 = step.ops().map(|(_, op)| (op.bytes() / 1e3).max(op.flops / 1e4) + op.launches * 1e-3).sum();
        prop_assert!(close(step.time(), wanted + 0.1, 1e-12));
        prop_assert!(step.limit() <= step.time());
        let (memory, compute) = step.split();
        prop_assert!(close(memory + compute + step.fixed(), step.time(), 1e-12));
    }

    #[test]
    fn more_work_never_takes_less_time(model in models(), rows in rows(), more in rows()) {
        let all = [rows.clone(), more].concat();
        prop_assert!(cost(&model, &all).time() >= cost(&model, &rows).time());
        let mut longer = rows.clone();
        longer[0].context += 1;
        prop_assert!(cost(&model, &longer).time() >= cost(&model, &rows).time());
    }

    #[test]
    fn rows_added_one_by_one_are_the_batch_made_at_once(model in models(), rows in rows()) {
        let mut batch = Batch::default();
        rows.iter().for_each(|&row| batch.add(row, model.window));
        prop_assert_eq!(batch, Batch::new(rows, model.window));
    }
}
