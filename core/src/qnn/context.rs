//! Context handles and their configuration.

#![expect(unsafe_code, reason = "creates and frees contexts of the library")]

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use qhx_qnn_sys::{self as sys, Config, ConfigValue, Handle, HtpContextConfig};
use serde::{Deserialize, Serialize};

use super::codes;
use super::device::{Device, Raw, explain, freed};
use super::gate::Shared;
use super::log;
use super::profile::Profile;
use super::registered::Registrations;
use crate::{ErrorKind, Result};

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

/// A context. Closed when dropped.
pub(crate) struct ContextHandle {
    raw: Raw,
    device: Device,
    /// Memory that its graphs read and write in place.
    registrations: Arc<Registrations>,
    /// Graphs are composed in it; otherwise they are executed.
    composed: bool,
}

impl ContextHandle {
    /// An empty context, for graphs that are to be composed. The caller holds a
    /// [`super::gate::Exclusive`] until it is dropped.
    pub(crate) fn create(device: &Device, configs: &[ContextConfig]) -> Result<Self> {
        let library = device.library();
        let create = library.need(library.table().context_create, "contextCreate")?;
        let mut raw = std::ptr::null_mut();
        let mark = log::mark();
        let status = with_configs(configs, |list| {
            // SAFETY: contract: handles, arguments, answers.
            unsafe { create(device.backend(), device.raw(), list, &raw mut raw) }
        });
        if status != 0 {
            let error = codes::error(ErrorKind::Context, "creating a context", status);
            return Err(explain(error, mark));
        }
        Ok(Self::of(raw, device, true))
    }

    /// A context from a binary. The bytes are not needed any more afterwards.
    pub(crate) fn from_binary(
        device: &Device,
        configs: &[ContextConfig],
        bytes: &[u8],
        profile: Option<&Profile>,
        attempt: impl fmt::Display,
    ) -> Result<Self> {
        let _call = Shared::enter();
        let library = device.library();
        let create =
            library.need(library.table().context_create_from_binary, "contextCreateFromBinary")?;
        let profile = profile.map_or(std::ptr::null_mut(), Profile::raw);
        let mut raw = std::ptr::null_mut();
        let mark = log::mark();
        let status = with_configs(configs, |list| {
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
            return Err(explain(codes::error(ErrorKind::Context, attempt, status), mark));
        }
        Ok(Self::of(raw, device, false))
    }

    fn of(raw: Handle, device: &Device, composed: bool) -> Self {
        let (raw, device) = (Raw(raw), device.clone());
        let registrations = Registrations::new(raw, device.clone());
        Self { raw, device, registrations, composed }
    }

    pub(crate) fn registrations(&self) -> &Arc<Registrations> {
        &self.registrations
    }

    pub(crate) fn raw(&self) -> Handle {
        self.raw.0
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for ContextHandle {
    fn drop(&mut self) {
        if let Some(free) = self.device.library().table().context_free {
            let _call = (!self.composed).then(Shared::enter);
            self.registrations.close();
            // SAFETY: contract: handles.
            freed("context", unsafe { free(self.raw.0, std::ptr::null_mut()) });
        }
    }
}

/// Lays `configs` out as the library reads them, for the time of `call`.
fn with_configs<T>(configs: &[ContextConfig], call: impl FnOnce(sys::ConfigList) -> T) -> T {
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
            _ => Config {
                option: sys::CONFIG_CUSTOM,
                value: ConfigValue { pointer: (&raw const *custom).cast::<c_void>() },
            },
        })
        .collect();
    with_list(&entries, call)
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
