//! Clock votes: asks the NPU to run fast while there is work, and takes the wish back.

#![expect(unsafe_code, reason = "calls the library's power interface")]

use std::fmt;

use qhx_qnn_sys::{self as sys, DcvsV3, Infrastructure, PowerConfig, PowerValue};
use serde::{Deserialize, Serialize};

use super::codes;
use super::device::Device;
use crate::{Error, ErrorKind, Result};

/// How fast the NPU is asked to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PerfMode {
    /// Highest clocks, for the time of a request.
    #[default]
    Burst,
    /// High clocks that a warm device can hold.
    SustainedHigh,
    /// High clocks.
    High,
    /// Middle clocks.
    Balanced,
    /// Lower middle clocks.
    LowBalanced,
    /// Low clocks, upper step.
    HighPowerSaver,
    /// Low clocks.
    PowerSaver,
    /// Lowest clocks.
    LowPowerSaver,
    /// No wish: the device decides.
    DeviceDefault,
}

impl PerfMode {
    /// Every mode.
    pub const ALL: [Self; 9] = [
        Self::Burst,
        Self::SustainedHigh,
        Self::High,
        Self::Balanced,
        Self::LowBalanced,
        Self::HighPowerSaver,
        Self::PowerSaver,
        Self::LowPowerSaver,
        Self::DeviceDefault,
    ];

    /// The name in options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Burst => "burst",
            Self::SustainedHigh => "sustained-high",
            Self::High => "high",
            Self::Balanced => "balanced",
            Self::LowBalanced => "low-balanced",
            Self::HighPowerSaver => "high-power-saver",
            Self::PowerSaver => "power-saver",
            Self::LowPowerSaver => "low-power-saver",
            Self::DeviceDefault => "device-default",
        }
    }

    /// `(clock corner, sleep latency in µs, polls for answers)`.
    const fn vote(self) -> (u32, u32, bool) {
        match self {
            Self::Burst => (sys::CORNER_MAX, 40, true),
            Self::SustainedHigh | Self::High => (sys::CORNER_TURBO, 100, true),
            Self::Balanced => (sys::CORNER_NOM_PLUS, 1000, false),
            Self::LowBalanced => (sys::CORNER_NOM, 1000, false),
            Self::HighPowerSaver => (sys::CORNER_SVS_PLUS, 1000, false),
            Self::PowerSaver => (sys::CORNER_SVS, 1000, false),
            Self::LowPowerSaver | Self::DeviceDefault => (sys::CORNER_SVS2, 1000, false),
        }
    }
}

/// A standing with the NPU's clock governor. Dropping it takes the vote back.
pub(crate) struct Power {
    infrastructure: *const Infrastructure,
    id: u32,
    // Kept alive: the infrastructure belongs to the library's open device.
    _device: Device,
}

// SAFETY: contract: tables, threads.
unsafe impl Send for Power {}
// SAFETY: contract: tables, threads.
unsafe impl Sync for Power {}

impl Power {
    /// Registers with the governor.
    pub(crate) fn open(device: &Device) -> Result<Self> {
        let library = device.library();
        let get =
            library.need(library.table().device_get_infrastructure, "deviceGetInfrastructure")?;
        let mut infrastructure = std::ptr::null();
        // SAFETY: contract: answers.
        let status = unsafe { get(&raw mut infrastructure) };
        if status != 0 || infrastructure.is_null() {
            return Err(codes::error(ErrorKind::Runtime, "asking for clock control", status));
        }
        let mut id = 0;
        // SAFETY: contract: tables.
        let create = unsafe { (*infrastructure).create_power_config };
        let create = library.need(create, "createPowerConfigId")?;
        // SAFETY: contract: answers; device 0 and core 0 are the first of each.
        let status = unsafe { create(0, 0, &raw mut id) };
        if status != 0 {
            return Err(codes::error(ErrorKind::Runtime, "registering for clock control", status));
        }
        Ok(Self { infrastructure, id, _device: device.clone() })
    }

    /// Votes for `mode`; [`PerfMode::DeviceDefault`] takes the vote back.
    pub(crate) fn vote(&self, mode: PerfMode) -> Result<()> {
        let (corner, latency, polls) = mode.vote();
        let (power_mode, dcvs, latency) = if mode == PerfMode::DeviceDefault {
            (sys::POWER_MODE_SAVER, 1, 2000)
        } else {
            (sys::POWER_MODE_PERFORMANCE, u32::from(!polls), latency)
        };
        self.set(&[PowerConfig {
            option: sys::POWER_DCVS_V3,
            value: PowerValue {
                dcvs: DcvsV3 {
                    context: self.id,
                    set_enable: 1,
                    enable: dcvs,
                    mode: power_mode,
                    set_sleep_latency: 1,
                    sleep_latency: latency,
                    set_sleep_disable: 0,
                    sleep_disable: 0,
                    set_bus: 1,
                    bus_min: corner,
                    bus_target: corner,
                    bus_max: corner,
                    set_core: 1,
                    core_min: corner,
                    core_target: corner,
                    core_max: corner,
                },
            },
        }])?;
        let word = |option, word| {
            let mut value = PowerValue { opaque: [0; 16] };
            value.word = word;
            PowerConfig { option, value }
        };
        let polling = if polls { 9999 } else { 0 };
        // Older chips have no polling: the clock vote above stands all the same.
        if let Err(error) =
            self.set(&[word(sys::POWER_RPC_LATENCY, 100), word(sys::POWER_RPC_POLLING, polling)])
        {
            tracing::debug!(target: "qnn", error = %error.report(), "RPC latency is left as it is");
        }
        Ok(())
    }

    fn set(&self, configs: &[PowerConfig]) -> Result<()> {
        // SAFETY: contract: tables.
        let set = unsafe { (*self.infrastructure).set_power_config };
        let set = set.ok_or_else(|| {
            Error::new(ErrorKind::Runtime, "the QNN library offers no setPowerConfig")
        })?;
        let mut list: Vec<*const PowerConfig> = configs.iter().map(std::ptr::from_ref).collect();
        list.push(std::ptr::null());
        // SAFETY: contract: arguments; the id is registered.
        let status = unsafe { set(self.id, list.as_ptr()) };
        if status != 0 {
            return Err(codes::error(ErrorKind::Runtime, "voting for a clock", status));
        }
        Ok(())
    }
}

impl Drop for Power {
    fn drop(&mut self) {
        if let Err(error) = self.vote(PerfMode::DeviceDefault) {
            tracing::debug!(target: "qnn", error = %error.report(), "the clock vote was not taken back");
        }
        // SAFETY: contract: tables.
        if let Some(destroy) = unsafe { (*self.infrastructure).destroy_power_config } {
            // SAFETY: the id is registered and not used any more.
            super::device::freed("clock vote", unsafe { destroy(self.id) });
        }
    }
}

impl std::str::FromStr for PerfMode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::new(ErrorKind::Usage, format!("perf mode {name:?}, expected one of {names}"))
        })
    }
}

impl fmt::Debug for Power {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Power").field("id", &self.id).finish_non_exhaustive()
    }
}
