//! Sizes that are published, limits that were worked out by hand, and measured figures.
#![allow(clippy::unwrap_used)]

mod common;

use common::{close, h200, llama3_8b, llama3_70b, mixtral_8x7b, smollm2_q4_1, two_h200};
use octavo_cost::{Batch, Bound, Compute, Machine, Model, Op, Rates, Row, StepCost, StorageBytes};

fn cost(model: &Model, rows: &[Row], machine: &Machine) -> StepCost {
    model.validate().unwrap();
    machine.validate().unwrap();
    StepCost::new(
        model,
        &Batch::new(rows.iter().copied(), model.window),
        machine,
    )
}

#[test]
fn parameters_are_the_published_ones() {
    assert_eq!(llama3_8b().parameters(), 8_030_261_248.0);
    assert_eq!(llama3_70b().parameters(), 70_553_706_496.0);
    assert_eq!(mixtral_8x7b().parameters(), 46_702_792_704.0);
    assert_eq!(smollm2_q4_1().parameters(), 134_515_008.0);
}

#[test]
fn a_decode_step_of_llama_3_8b_takes_3_53_ms_at_the_least() {
    let step = cost(&llama3_8b(), &[Row::decode(128)], &h200());
    assert!(close(step.limit(), 3.53e-3, 2e-3), "{}", step.limit());
    assert_eq!(step.bound(), Bound::Memory);
    // 4,096 tokens more read 4,096 × 131,072 bytes more.
    let long = cost(&llama3_8b(), &[Row::decode(4096)], &h200());
    assert!(close(
        long.limit() - step.limit(),
        3968.0 * 131_072.0 / 4.25e12,
        1e-9
    ));
    assert!(close(long.limit(), 3.66e-3, 2e-3));
}

#[test]
fn a_batch_of_64_shares_the_weights() {
    let step = cost(&llama3_8b(), &[Row::decode(1024); 64], &h200());
    let weights = 2.0 * (8_030_261_248.0 - 128_256.0 * 4096.0);
    let wanted = (weights + 64.0 * 1026.0 * 131_072.0 + 64.0 * 4096.0 * 2.0) / 4.25e12;
    // The rest is the arithmetic of norms.
    assert!(
        close(step.limit(), wanted, 3e-4),
        "{} {wanted}",
        step.limit()
    );
}

#[test]
fn a_70b_model_reads_140_gb_in_70_ms_at_2_tb_per_second() {
    let machine = Machine::ideal(2e12, Rates::uniform(1e15));
    let model = llama3_70b();
    assert!(close(model.weight_bytes(), 140e9, 0.01));
    assert!(close(model.weight_bytes() / machine.bandwidth, 70e-3, 0.01));
    // A step does not read the input embedding, 2.1 GB.
    let step = cost(&model, &[Row::decode(1)], &machine);
    assert!(close(step.limit(), 69.5e-3, 1e-3), "{}", step.limit());
}

#[test]
fn a_prefill_of_8192_tokens_takes_176_ms_at_750_tflops() {
    let step = cost(&llama3_8b(), &[Row::prefill(8192)], &h200());
    assert!(close(step.limit(), 176e-3, 5e-3), "{}", step.limit());
    assert_eq!(step.bound(), Bound::Compute);
    let chunks = cost(&llama3_8b(), &[Row::prefill(2048); 8], &h200());
    assert!(close(chunks.limit(), 317e-3, 0.01), "{}", chunks.limit());
    let short = cost(&llama3_8b(), &[Row::prefill(1024)], &h200());
    assert!(close(short.limit(), 19.4e-3, 0.02), "{}", short.limit());
}

#[test]
fn chunks_of_a_prompt_do_the_attention_of_the_whole() {
    let whole = cost(&llama3_8b(), &[Row::prefill(8192)], &h200());
    let chunk = |at: u32| Row {
        query: 512,
        context: 512 * at,
        logits: u32::from(at == 15),
    };
    let steps: Vec<StepCost> = (0..16)
        .map(|at| cost(&llama3_8b(), &[chunk(at)], &h200()))
        .collect();
    let flops = |op: Op| steps.iter().map(|step| step.op(op).flops).sum::<f64>();
    for op in [Op::Attention, Op::Qkv, Op::GateUp, Op::Head] {
        assert!(close(flops(op), whole.op(op).flops, 1e-12), "{op:?}");
    }
    let weights = steps
        .iter()
        .map(|step| step.op(Op::Down).weight_bytes)
        .sum::<f64>();
    assert_eq!(weights, 16.0 * whole.op(Op::Down).weight_bytes);
}

#[test]
fn eight_bit_weights_halve_decode_and_lift_the_ceiling_of_prefill() {
    let fp8 = Model {
        bytes: StorageBytes {
            attention: 1.0,
            ffn: 1.0,
            ..llama3_8b().bytes
        },
        compute: Compute::Fp8,
        ..llama3_8b()
    };
    let step = cost(&fp8, &[Row::decode(128)], &h200());
    assert!(
        close(
            step.limit(),
            (6_979_321_856.0 + 2.0 * 525_336_576.0) / 4.25e12,
            4e-3
        ),
        "{}",
        step.limit()
    );
    let prefill = cost(&fp8, &[Row::prefill(8192)], &h200());
    assert!(close(prefill.limit(), 176e-3 * 750.0 / 1200.0, 0.01));
}

#[test]
fn smollm2_reads_96_6_mb_a_token() {
    let model = smollm2_q4_1();
    assert!(
        close(model.weight_bytes(), 96.6e6, 1e-3),
        "{}",
        model.weight_bytes()
    );
    for (bandwidth, tokens_per_second) in [(39e9, 404.0), (46e9, 476.0)] {
        let step = cost(
            &model,
            &[Row::decode(0)],
            &Machine::ideal(bandwidth, Rates::uniform(2e12)),
        );
        assert!(
            close(1.0 / step.limit(), tokens_per_second, 5e-3),
            "{}",
            1.0 / step.limit()
        );
    }
    // At the int8 ceiling of the same two cores a prefill cannot pass about 7,600 tokens/s.
    let step = cost(
        &model,
        &[Row::prefill(1024)],
        &Machine::ideal(40e9, Rates::uniform(2.15e12)),
    );
    let rate = 1024.0 / step.limit();
    assert!((7_000.0..10_000.0).contains(&rate), "{rate}");
}

#[test]
fn one_token_reads_two_experts_and_many_tokens_read_all() {
    let model = mixtral_8x7b();
    let per_token =
        |step: &StepCost| (step.op(Op::GateUp).weight_bytes + step.op(Op::Down).weight_bytes) / 2.0;
    let one_expert = 32.0 * 3.0 * 4096.0 * 14_336.0;
    let one = cost(&model, &[Row::decode(0)], &h200());
    assert!(close(per_token(&one), 2.0 * one_expert, 1e-12));
    let many = cost(&model, &[Row::decode(0); 256], &h200());
    assert!(close(per_token(&many), 8.0 * one_expert, 1e-9));
    // Published: 12.9 billion parameters are active for a token.
    let active: f64 = [
        Op::Qkv,
        Op::Output,
        Op::Router,
        Op::GateUp,
        Op::Down,
        Op::Head,
    ]
    .iter()
    .map(|&op| one.op(op).flops / 2.0)
    .sum();
    assert!(close(active + 32_000.0 * 4096.0, 12.88e9, 1e-3), "{active}");
}

#[test]
fn two_devices_halve_the_bytes_and_pay_for_sums() {
    let alone = cost(&llama3_8b(), &[Row::decode(128)], &h200());
    let pair = cost(&llama3_8b(), &[Row::decode(128)], &two_h200());
    assert!(close(
        pair.op(Op::GateUp).weight_bytes,
        alone.op(Op::GateUp).weight_bytes / 2.0,
        1e-12
    ));
    assert!(close(
        pair.op(Op::Attention).kv_bytes,
        alone.op(Op::Attention).kv_bytes / 2.0,
        1e-12
    ));
    assert!(close(
        pair.op(Op::AllReduce).link_time,
        64.0 * (6.5e-6 + 8192.0 / 355e9),
        1e-12
    ));
    assert_eq!(alone.op(Op::AllReduce).time(), 0.0);
    // Measured for 8,192 tokens of 4,096 bf16 numbers: 212 µs.
    let long = cost(&llama3_8b(), &[Row::prefill(8192)], &two_h200());
    assert!(close(long.op(Op::AllReduce).link_time / 64.0, 212e-6, 0.1));
}

#[test]
fn the_published_offline_workload_is_limited_to_about_12_300_tokens_a_second() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/vectors/offline_256.json"
    );
    let work: Vec<(u32, u32)> =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(work.iter().map(|work| work.1).sum::<u32>(), 133_966);
    let model = llama3_8b();
    let machine = h200();
    let mut time: f64 = work
        .iter()
        .map(|work| cost(&model, &[Row::prefill(work.0)], &machine).limit())
        .sum();
    for done in 1..1024 {
        let running: Vec<Row> = work
            .iter()
            .filter(|work| work.1 > done)
            .map(|work| Row::decode(work.0 + done - 1))
            .collect();
        if !running.is_empty() {
            time += cost(&model, &running, &machine).limit();
        }
    }
    let rate = 133_966.0 / time;
    assert!(close(rate, 12_300.0, 0.06), "{rate}");
}

#[test]
fn shares_of_the_limit_are_one_for_a_step_at_the_limit() {
    let decode = cost(&llama3_8b(), &[Row::decode(128)], &h200());
    assert!(close(decode.mbu(decode.limit()), 1.0, 1e-3));
    assert!(close(decode.fraction_of_limit(4.68e-3), 0.755, 2e-3));
    let prefill = cost(&llama3_8b(), &[Row::prefill(8192)], &h200());
    assert!(close(prefill.mfu(prefill.limit()), 1.0, 3e-3));
    assert!(close(prefill.mfu(2.0 * prefill.limit()), 0.5, 3e-3));
    assert!(prefill.mbu(prefill.limit()) < 0.05);
}

#[test]
fn overheads_are_added_and_can_be_what_bounds_a_step() {
    let machine = Machine {
        op_overhead: 26e-6,
        step_overhead: 1e-3,
        ..h200()
    };
    let step = cost(&llama3_8b(), &[Row::decode(128)], &machine);
    // Six launches a layer (qkv, KV write, attention, output, gate-up, down), 65 norms, embedding and head.
    assert!(close(
        step.time() - step.limit(),
        1e-3 + 26e-6 * (6.0 * 32.0 + 65.0 + 2.0),
        1e-6
    ));
    assert_eq!(step.bound(), Bound::Overhead);
    assert!(close(
        step.fixed() + step.split().0 + step.split().1,
        step.time(),
        1e-12
    ));
}

#[test]
fn impossible_descriptions_are_refused_by_field() {
    let message = |model: Model| model.validate().unwrap_err().to_string();
    let base = llama3_8b();
    assert_eq!(
        message(Model { layers: 0, ..base }),
        "layers must be positive and finite, got 0"
    );
    let attention = octavo_cost::Attention {
        kv_heads: 64,
        ..base.attention
    };
    assert_eq!(
        message(Model { attention, ..base }),
        "kv_heads must be at most 32, got 64"
    );
    let bytes = StorageBytes {
        kv: f64::NAN,
        ..base.bytes
    };
    assert_eq!(
        message(Model { bytes, ..base }),
        "bytes.kv must be positive and finite, got NaN"
    );
    let machine = Machine {
        bandwidth: -1.0,
        ..h200()
    };
    assert_eq!(
        machine.validate().unwrap_err().to_string(),
        "bandwidth must be positive and finite, got -1"
    );
    assert!(
        Machine {
            devices: 2,
            ..h200()
        }
        .validate()
        .is_err()
    );
    assert!(two_h200().validate().is_ok());
}
