//! Context handles and their configuration.

#![expect(unsafe_code, reason = "creates and frees contexts of the library")]

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use qhx_base::{ErrorKind, Result};
use qhx_qnn_sys::{self as sys, Config, ConfigValue, Handle, HtpContextConfig};
use serde::{Deserialize, Serialize};

use super::causes;
use super::device::{Device, OpenContext, Raw, freed};
use super::gate::{self, Exclusive};
use super::log;
use super::profile::Profile;
use super::registered::Registrations;

/// Which context runs first when several want the NPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Priority {
    /// Yields to everything else.
    Low,
    /// The library's default.
    #[default]
    Normal,
    /// Before normal work.
    NormalHigh,
    /// Before everything else.
    High,
}

impl Priority {
    const fn code(self) -> u32 {
        match self {
            Self::Low => sys::PRIORITY_LOW,
            Self::Normal => sys::PRIORITY_NORMAL,
            Self::NormalHigh => sys::PRIORITY_NORMAL_HIGH,
            Self::High => sys::PRIORITY_HIGH,
        }
    }
}

/// One option of a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ContextConfig {
    /// Scheduling priority of its graphs.
    Priority(Priority),
    /// Graphs of the context keep equal weights once. Such a binary loads on a device only.
    WeightSharing(bool),
    /// Limits how much of the file is resident while it is read.
    FileReadBudgetMb(u64),
    /// Uses the wider DMA engine of v81 and later.
    ExtendedUdma(bool),
}

/// Contexts that share one buffer for what does not fit the tightly coupled memory. No two of them may
/// execute at a time.
#[derive(Clone)]
pub(crate) struct SpillFill {
    /// The context that has the buffer; `None` for that one itself.
    pub(crate) leader: Option<Arc<ContextHandle>>,
    /// Bytes that the neediest of their graphs wants.
    pub(crate) bytes: u64,
}

/// A context. Closed when dropped.
pub(crate) struct ContextHandle {
    raw: Raw,
    device: Device,
    /// Freed after this one: it has the buffer that both use.
    _leader: Option<Arc<ContextHandle>>,
    /// Memory that its graphs read and write in place.
    registrations: Arc<Registrations>,
    /// Graphs are composed in it; otherwise they are executed.
    composed: bool,
    closed: AtomicBool,
}

impl ContextHandle {
    /// An empty context, for graphs that are to be composed. The caller holds a
    /// [`super::gate::Exclusive`] until it is dropped.
    pub(crate) fn create(device: &Device, configs: &[ContextConfig]) -> Result<Self> {
        let library = device.library();
        let create = library.need(library.table().context_create, "contextCreate")?;
        let mut raw = std::ptr::null_mut();
        let mark = log::mark();
        let status = with_configs(configs, None, |list| {
            // SAFETY: contract: handles, arguments, answers.
            unsafe { create(device.backend(), device.raw(), list, &raw mut raw) }
        });
        causes::check(ErrorKind::Context, "creating a context", status, mark)?;
        Ok(Self::of(raw, device, None, true))
    }

    /// A context from a binary. The bytes are not needed any more afterwards.
    pub(crate) fn from_binary(
        device: &Device,
        configs: &[ContextConfig],
        spill_fill: Option<&SpillFill>,
        bytes: &[u8],
        profile: Option<&Profile>,
        attempt: impl fmt::Display,
    ) -> Result<Self> {
        let _call = gate::loading();
        let library = device.library();
        let create =
            library.need(library.table().context_create_from_binary, "contextCreateFromBinary")?;
        let profile = profile.map_or(std::ptr::null_mut(), Profile::raw);
        let mut raw = std::ptr::null_mut();
        let mark = log::mark();
        let status = with_configs(configs, spill_fill, |list| {
            // SAFETY: contract: handles, arguments (no option given lets the library keep the bytes), answers.
            unsafe {
                create(
                    device.backend(),
                    device.raw(),
                    list,
                    bytes.as_ptr().cast(),
                    bytes.len() as u64,
                    &raw mut raw,
                    profile,
                )
            }
        });
        if status != 0 {
            device.note(status);
            return Err(causes::error(ErrorKind::Context, attempt, status, mark, library));
        }
        Ok(Self::of(raw, device, spill_fill.and_then(|s| s.leader.clone()), false))
    }

    fn of(raw: Handle, device: &Device, leader: Option<Arc<Self>>, composed: bool) -> Self {
        let (raw, device) = (Raw(raw), device.clone());
        let registrations = Registrations::new(raw, device.clone());
        let closed = AtomicBool::new(false);
        Self { raw, device, _leader: leader, registrations, composed, closed }
    }

    pub(crate) fn registrations(&self) -> &Arc<Registrations> {
        &self.registrations
    }

    pub(crate) fn raw(&self) -> Handle {
        self.raw.0
    }

    /// It is freed already. To be asked within a call that the gate let in, as long as the answer counts.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn free(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.registrations.close();
        if let Some(free) = self.device.library().table().context_free {
            // SAFETY: contract: handles; it is freed once.
            freed("context", unsafe { free(self.raw.0, std::ptr::null_mut()) });
        }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}

impl OpenContext for ContextHandle {
    fn close(&self) {
        // Who uses a handle of the context does so in a shared call, and asks first whether it is closed.
        let _alone = Exclusive::begin();
        self.free();
    }
}

impl Drop for ContextHandle {
    fn drop(&mut self) {
        if !self.is_closed() {
            let _call = (!self.composed).then(gate::loading);
            self.free();
        }
    }
}

/// Lays `configs` out as the library reads them, for the time of `call`.
fn with_configs<T>(
    configs: &[ContextConfig],
    spill_fill: Option<&SpillFill>,
    call: impl FnOnce(sys::ConfigList) -> T,
) -> T {
    let group = spill_fill.map(|SpillFill { leader, bytes }| {
        let leader = leader.as_ref().map_or(0, |leader| leader.raw().addr() as u64);
        HtpContextConfig { option: sys::HTP_CONTEXT_GROUP, value: [leader, *bytes] }
    });
    let custom: Vec<HtpContextConfig> = configs
        .iter()
        .map(|config| {
            let (option, value) = match *config {
                ContextConfig::Priority(_) => (0, 0),
                ContextConfig::WeightSharing(on) => (sys::HTP_CONTEXT_WEIGHT_SHARING, on.into()),
                ContextConfig::FileReadBudgetMb(mb) => (sys::HTP_CONTEXT_FILE_READ_BUDGET, mb),
                ContextConfig::ExtendedUdma(on) => (sys::HTP_CONTEXT_EXTENDED_UDMA, on.into()),
            };
            HtpContextConfig { option, value: [value, 0] }
        })
        .collect();
    let entries: Vec<Config> = configs
        .iter()
        .zip(&custom)
        .map(|(config, custom)| match config {
            ContextConfig::Priority(priority) => Config {
                option: sys::CONTEXT_PRIORITY,
                value: ConfigValue { number: priority.code().into() },
            },
            _ => of_htp(custom),
        })
        .chain(group.as_ref().map(of_htp))
        .collect();
    with_list(&entries, call)
}

fn of_htp(config: &HtpContextConfig) -> Config {
    let pointer = std::ptr::from_ref(config).cast::<c_void>();
    Config { option: sys::CONFIG_CUSTOM, value: ConfigValue { pointer } }
}

/// A NULL-terminated list of pointers to `entries`, or NULL when there are none.
pub(crate) fn with_list<T>(entries: &[Config], call: impl FnOnce(sys::ConfigList) -> T) -> T {
    if entries.is_empty() {
        return call(std::ptr::null());
    }
    let mut list: Vec<*const Config> = entries.iter().map(std::ptr::from_ref).collect();
    list.push(std::ptr::null());
    call(list.as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_laid_out_as_the_library_reads_them() {
        let configs =
            [ContextConfig::Priority(Priority::High), ContextConfig::FileReadBudgetMb(64)];
        let group = SpillFill { leader: None, bytes: 4096 };
        with_configs(&configs, Some(&group), |list| {
            // SAFETY: three configurations and NULL, as `with_configs` says, for the time of this call;
            // the options of the last two say that they lead to options of HTP.
            unsafe {
                let at = |index: usize| &**list.add(index);
                let custom = |index| {
                    let config = at(index);
                    assert_eq!(config.option, sys::CONFIG_CUSTOM);
                    let config = &*config.value.pointer.cast::<HtpContextConfig>();
                    (config.option, config.value)
                };
                assert_eq!((at(0).option, at(0).value.word), (sys::CONTEXT_PRIORITY, 200));
                assert_eq!(custom(1), (3, [64, 0]));
                assert_eq!(custom(2), (2, [0, 4096]));
                assert!((*list.add(3)).is_null());
            }
        });
        with_configs(&[], None, |list| assert!(list.is_null()));
    }
}
