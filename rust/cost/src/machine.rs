//! How fast a machine reads, computes and talks. Rates are the best measured ones, in bytes and operations per second.

use crate::calibration::Calibration;
use crate::{CostError, positive};

/// The kind of numbers that a matrix product multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    /// 32-bit floats.
    F32,
    /// 16-bit floats of either kind.
    Bf16,
    /// 8-bit floats.
    Fp8,
    /// 8-bit integers.
    Int8,
}

/// Operations per second (a multiply-add is two) by the kind of numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// 32-bit floats.
    pub f32: f64,
    /// 16-bit floats.
    pub bf16: f64,
    /// 8-bit floats.
    pub fp8: f64,
    /// 8-bit integers.
    pub int8: f64,
}

impl Rates {
    /// The same rate for every kind.
    pub fn uniform(rate: f64) -> Self {
        Self {
            f32: rate,
            bf16: rate,
            fp8: rate,
            int8: rate,
        }
    }

    /// The rate of one kind.
    pub fn of(&self, compute: Compute) -> f64 {
        match compute {
            Compute::F32 => self.f32,
            Compute::Bf16 => self.bf16,
            Compute::Fp8 => self.fp8,
            Compute::Int8 => self.int8,
        }
    }
}

/// How devices of one group talk to each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bytes per second that one device sends.
    pub bandwidth: f64,
    /// Seconds before the first byte arrives.
    pub latency: f64,
}

/// One device, or a group of equal ones that share each layer (tensor parallelism).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Bytes per second read from one device's memory, by a working set that no cache holds.
    pub bandwidth: f64,
    /// Operations per second of one device.
    pub rates: Rates,
    /// Seconds that each launched operation adds (one per layer and operation).
    pub op_overhead: f64,
    /// Seconds that each step adds.
    pub step_overhead: f64,
    /// Devices that share each layer.
    pub devices: u32,
    /// The link between them; not looked at for one device.
    pub link: Link,
}

impl Machine {
    /// One device without overheads: the limit.
    pub fn ideal(bandwidth: f64, rates: Rates) -> Self {
        let link = Link {
            bandwidth: f64::INFINITY,
            latency: 0.0,
        };
        Self {
            bandwidth,
            rates,
            op_overhead: 0.0,
            step_overhead: 0.0,
            devices: 1,
            link,
        }
    }

    /// Refuses rates that are not positive.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub fn validate(&self) -> Result<(), CostError> {
        positive(&[
            ("bandwidth", self.bandwidth),
            ("rates.f32", self.rates.f32),
            ("rates.bf16", self.rates.bf16),
            ("rates.fp8", self.rates.fp8),
            ("rates.int8", self.rates.int8),
            // 0 is allowed here.
            ("op_overhead", self.op_overhead + f64::MIN_POSITIVE),
            ("step_overhead", self.step_overhead + f64::MIN_POSITIVE),
            ("devices", f64::from(self.devices)),
        ])?;
        if self.devices > 1 {
            let latency = self.link.latency + f64::MIN_POSITIVE;
            positive(&[
                ("link.bandwidth", self.link.bandwidth),
                ("link.latency", latency),
            ])?;
        }
        Ok(())
    }

    /// The same machine as it was measured to be: rates times efficiency, and the measured overhead of a step.
    pub fn calibrated(&self, calibration: &Calibration) -> Self {
        let (memory, compute) = (
            calibration.memory_efficiency,
            calibration.compute_efficiency,
        );
        let r = self.rates;
        let rates = Rates {
            f32: r.f32 * compute,
            bf16: r.bf16 * compute,
            fp8: r.fp8 * compute,
            int8: r.int8 * compute,
        };
        Self {
            bandwidth: self.bandwidth * memory,
            rates,
            op_overhead: 0.0,
            step_overhead: calibration.overhead,
            ..*self
        }
    }

    /// Seconds of one all-reduce of `bytes` over the group: a ring sends everything but one share twice.
    pub(crate) fn all_reduce(&self, bytes: f64) -> f64 {
        if self.devices == 1 {
            return 0.0;
        }
        let devices = f64::from(self.devices);
        self.link.latency + 2.0 * (devices - 1.0) / devices * bytes / self.link.bandwidth
    }
}
