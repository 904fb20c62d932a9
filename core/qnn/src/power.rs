//! Power votes: asks the NPU to run fast while there is work, and takes the vote back.
//!
//! A vote is of three parts: clocks with sleep latency (DCVS v3), how long a call to the DSP may take
//! to arrive (RPC control latency), and how long the host polls for its answer before it sleeps. The
//! figures are those of the public runtimes. Each part is a call of its own, so that a chip without
//! one has the others.

#![expect(unsafe_code, reason = "calls the library's power interface")]

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use qhx_base::{Error, ErrorKind, Result};
use qhx_qnn_sys::{self as sys, DcvsV3, Infrastructure, PowerConfig, PowerValue};
use serde::{Deserialize, Serialize};

use super::codes;
use super::device::Device;

/// Speed that the NPU is asked to run at.
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
    /// No vote: the device decides.
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

    /// Short names of some modes in options.
    pub const ALIASES: [(&str, Self); 2] =
        [("sustained", Self::SustainedHigh), ("low", Self::PowerSaver)];

    const fn vote(self) -> Vote {
        let (corner, sleep_latency, polls) = match self {
            Self::Burst => (sys::CORNER_MAX, 40, true),
            Self::SustainedHigh | Self::High => (sys::CORNER_TURBO, 100, true),
            Self::Balanced => (sys::CORNER_NOM_PLUS, 1000, false),
            Self::LowBalanced => (sys::CORNER_NOM, 1000, false),
            Self::HighPowerSaver => (sys::CORNER_SVS_PLUS, 1000, false),
            Self::PowerSaver => (sys::CORNER_SVS, 1000, false),
            Self::LowPowerSaver => (sys::CORNER_SVS2, 1000, false),
            Self::DeviceDefault => return Vote::NONE,
        };
        Vote {
            mode: sys::POWER_MODE_PERFORMANCE,
            dcvs: !polls,
            corner,
            sleep_latency,
            rpc_latency: 100,
            rpc_polling: if polls { MAX_POLLING } else { 0 },
        }
    }
}

/// The longest time in µs that the library polls for an answer.
const MAX_POLLING: u32 = 9999;

/// Power vote. Times are in µs.
#[derive(Debug, Clone, Copy)]
struct Vote {
    mode: u32,
    /// The governor may change the clocks.
    dcvs: bool,
    /// Corner of the clocks of bus and cores.
    corner: u32,
    sleep_latency: u32,
    rpc_latency: u32,
    rpc_polling: u32,
}

impl Vote {
    /// No vote.
    const NONE: Self = Self {
        mode: sys::POWER_MODE_SAVER,
        dcvs: true,
        corner: sys::CORNER_SVS2,
        sleep_latency: 2000,
        rpc_latency: 0,
        rpc_polling: 0,
    };
}

/// A client of the NPU's power governor.
struct Governor {
    infrastructure: *const Infrastructure,
    id: u32,
    // Kept alive: the infrastructure belongs to the library's open device.
    _device: Device,
}

// SAFETY: contract: tables, threads.
unsafe impl Send for Governor {}
// SAFETY: contract: tables, threads.
unsafe impl Sync for Governor {}

impl Governor {
    fn open(device: &Device) -> Result<Self> {
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
        codes::check(ErrorKind::Runtime, "registering for clock control", status)?;
        Ok(Self { infrastructure, id, _device: device.clone() })
    }

    fn vote(&self, vote: Vote) -> Result<()> {
        let Vote { corner, .. } = vote;
        let dcvs = DcvsV3 {
            context: self.id,
            set_enable: 1,
            enable: vote.dcvs.into(),
            mode: vote.mode,
            set_sleep_latency: 1,
            sleep_latency: vote.sleep_latency,
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
        };
        self.set(PowerConfig { option: sys::POWER_DCVS_V3, value: PowerValue { dcvs } })?;
        for (option, word) in
            [(sys::POWER_RPC_LATENCY, vote.rpc_latency), (sys::POWER_RPC_POLLING, vote.rpc_polling)]
        {
            let mut value = PowerValue { opaque: [0; 16] };
            value.word = word;
            // Older chips have no polling: the clock vote above stands all the same.
            if let Err(error) = self.set(PowerConfig { option, value }) {
                tracing::debug!(target: "qnn", option, error = %error.report(), "left as it is");
            }
        }
        Ok(())
    }

    fn set(&self, config: PowerConfig) -> Result<()> {
        // SAFETY: contract: tables.
        let set = unsafe { (*self.infrastructure).set_power_config };
        let set = set.ok_or_else(|| {
            Error::new(ErrorKind::Runtime, "the QNN library offers no setPowerConfig")
        })?;
        let list = [&raw const config, std::ptr::null()];
        // SAFETY: contract: arguments; the id is registered.
        let status = unsafe { set(self.id, list.as_ptr()) };
        codes::check(ErrorKind::Runtime, "voting for a clock", status)
    }
}

impl Drop for Governor {
    fn drop(&mut self) {
        if let Err(error) = self.vote(Vote::NONE) {
            tracing::debug!(target: "qnn", error = %error.report(), "the clock vote was not taken back");
        }
        // SAFETY: contract: tables.
        if let Some(destroy) = unsafe { (*self.infrastructure).destroy_power_config } {
            // SAFETY: the id is registered and not used any more.
            super::device::freed("clock vote", unsafe { destroy(self.id) });
        }
    }
}

/// The power mode that is voted for; the vote is taken back while nothing runs, and at the end.
pub(crate) struct Power {
    device: Device,
    /// `None` until there is a vote.
    governor: OnceLock<Governor>,
    mode: Mutex<PerfMode>,
    /// Taken back for now.
    released: AtomicBool,
    /// Executions under way.
    running: AtomicUsize,
    /// When the last one ended: milliseconds since `epoch`.
    last: AtomicU64,
    epoch: Instant,
}

impl Power {
    /// No vote yet.
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            governor: OnceLock::new(),
            mode: Mutex::new(PerfMode::DeviceDefault),
            released: AtomicBool::new(false),
            running: AtomicUsize::new(0),
            last: AtomicU64::new(0),
            epoch: Instant::now(),
        }
    }

    /// A power mode has been voted for.
    pub(crate) fn votes(&self) -> bool {
        self.governor.get().is_some()
    }

    /// The vote is taken back, as nothing runs.
    pub(crate) fn released(&self) -> bool {
        self.released.load(Ordering::SeqCst)
    }

    /// Votes for another mode from now on; [`PerfMode::DeviceDefault`] takes the vote back.
    pub(crate) fn set_mode(&self, mode: PerfMode) -> Result<()> {
        let mut current = self.mode.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = match self.governor.get() {
            None if mode == PerfMode::DeviceDefault => return Ok(()),
            None => Some(Governor::open(&self.device)?),
            Some(_) => None,
        };
        if !self.released.load(Ordering::SeqCst)
            && let Some(governor) = opened.as_ref().or(self.governor.get())
        {
            governor.vote(mode.vote())?;
        }
        *current = mode;
        if let Some(opened) = opened {
            // Under the lock of the mode: nobody else sets one.
            let _ = self.governor.set(opened);
        }
        Ok(())
    }

    /// To be called before an execution: votes again if the vote was taken back. What it returns
    /// lives until the execution is over.
    pub(crate) fn working(&self) -> Working<'_> {
        // In this order: who releases looks the other way round, so that one of both sees the other.
        self.running.fetch_add(1, Ordering::SeqCst);
        if self.released.load(Ordering::SeqCst) {
            self.restore();
        }
        Working(self)
    }

    fn restore(&self) {
        let current = self.mode.lock().unwrap_or_else(PoisonError::into_inner);
        if self.released.swap(false, Ordering::SeqCst)
            && let Some(governor) = self.governor.get()
            && let Err(error) = governor.vote(current.vote())
        {
            tracing::warn!("the power mode is not set: {}", error.message());
        }
    }

    fn release(&self) {
        let _current = self.mode.lock().unwrap_or_else(PoisonError::into_inner);
        if self.released.swap(true, Ordering::SeqCst) {
            return;
        }
        if self.running.load(Ordering::SeqCst) > 0 {
            self.released.store(false, Ordering::SeqCst);
        } else if let Some(governor) = self.governor.get()
            && let Err(error) = governor.vote(Vote::NONE)
        {
            tracing::debug!(target: "qnn", error = %error.report(), "the clock vote was not taken back");
        }
    }

    /// Time since the last execution; zero while one runs.
    fn idle(&self) -> Duration {
        if self.running.load(Ordering::SeqCst) > 0 {
            return Duration::ZERO;
        }
        let last = Duration::from_millis(self.last.load(Ordering::SeqCst));
        self.epoch.elapsed().saturating_sub(last)
    }
}

/// An execution under way.
pub(crate) struct Working<'a>(&'a Power);

impl Drop for Working<'_> {
    fn drop(&mut self) {
        let Power { last, running, epoch, .. } = self.0;
        let now = u64::try_from(epoch.elapsed().as_millis()).unwrap_or(u64::MAX);
        last.store(now, Ordering::SeqCst);
        running.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Takes the vote back whenever nothing has run for a while. Ends when it is dropped.
pub(crate) struct IdleWatch {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl IdleWatch {
    /// Begins to watch.
    pub(crate) fn begin(power: &Arc<Power>, after: Duration) -> Result<Self> {
        let (stop, stopped) = channel();
        let power = Arc::clone(power);
        let watch = move || {
            let mut wait = after;
            while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                wait = match after.saturating_sub(power.idle()) {
                    Duration::ZERO => {
                        power.release();
                        after
                    }
                    rest => rest,
                }
                .max(Duration::from_millis(1));
            }
        };
        let thread = std::thread::Builder::new().name("qhx-idle".to_owned()).spawn(watch);
        let thread = thread.map_err(|e| {
            Error::caused(
                ErrorKind::Internal,
                "the watch over the NPU's power mode cannot start",
                e,
            )
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for IdleWatch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has reported it.
            let _ = thread.join();
        }
    }
}

impl std::str::FromStr for PerfMode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let alias = Self::ALIASES.iter().find(|(alias, _)| *alias == name).map(|(_, mode)| *mode);
        alias.or_else(|| Self::ALL.into_iter().find(|mode| mode.name() == name)).ok_or_else(|| {
            let aliases = Self::ALIASES.iter().map(|(alias, _)| *alias);
            let names: Vec<_> = Self::ALL.iter().map(|mode| mode.name()).chain(aliases).collect();
            let names = names.join(", ");
            Error::new(ErrorKind::Usage, format!("perf mode {name:?}, expected one of {names}"))
        })
    }
}

impl fmt::Debug for Power {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Power").field("votes", &self.votes()).finish_non_exhaustive()
    }
}
