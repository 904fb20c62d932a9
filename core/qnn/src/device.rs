//! Log, backend and device handles: everything that contexts live on.

#![expect(unsafe_code, reason = "calls the library with handles that it made")]

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use qhx_base::{ErrorKind, Result};
use qhx_qnn_sys::{self as sys, Config, ConfigValue, Handle};
use serde::Serialize;

use super::causes;
use super::codes;
use super::gate::Exclusive;
use super::library::{EMULATES, Library};
use super::log::{self, LogLevel};
use super::target::Target;

/// The library's report about the machine it runs on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Platform {
    /// Hexagon architecture, when the library reports one.
    pub arch: Option<u32>,
    /// The library's number of the chip.
    pub soc: Option<u32>,
    /// Tightly coupled memory in MB.
    pub vtcm_mb: Option<u64>,
    /// Number of NPU cores.
    pub cores: u32,
    /// The library emulates the NPU: it executes binaries of every architecture, and what it says
    /// of the chip means nothing.
    pub emulated: bool,
}

impl Platform {
    /// True on hosts for which the libraries hold an emulator instead of a driver.
    pub const fn is_emulated() -> bool {
        EMULATES
    }
}

/// An opened device with its backend and log. Clones share it; it is closed when nothing uses it.
#[derive(Clone)]
pub struct Device(Arc<DeviceHandle>);

// Fields drop in order, after the structure's own `drop`: device, backend, log.
struct DeviceHandle {
    raw: Raw,
    /// The DSP restarted under it.
    lost: AtomicBool,
    /// The contexts open on it.
    contexts: Mutex<Vec<Weak<dyn OpenContext>>>,
    backend: BackendHandle,
}

/// A context that lives on a device.
pub(crate) trait OpenContext: Send + Sync {
    /// Frees the context while others still have it, because its device is lost.
    fn close(&self);
}

struct BackendHandle {
    raw: Raw,
    log: LogHandle,
}

struct LogHandle {
    raw: Raw,
    library: Library,
}

/// A handle of the library.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Raw(pub(crate) Handle);

// SAFETY: contract: handles, threads.
unsafe impl Send for Raw {}
// SAFETY: contract: handles, threads.
unsafe impl Sync for Raw {}

impl Device {
    /// Opens the machine's device, or with `target` a device to compile for.
    ///
    /// # Errors
    /// When the library refuses the backend or the device.
    pub fn open(library: &Library, level: LogLevel, target: Option<Target>) -> Result<Self> {
        let _exclusive = Exclusive::begin();
        let backend = BackendHandle::create(LogHandle::create(library, level)?)?;
        let raw = match target {
            None => create_device(&backend, std::ptr::null(), "opening the device")?,
            Some(target) => with_target(library, target, |list| {
                create_device(&backend, list, &format!("opening a device for {target}"))
            })?,
        };
        let (lost, contexts) = (AtomicBool::new(false), Mutex::default());
        Ok(Self(Arc::new(DeviceHandle { raw, lost, contexts, backend })))
    }

    /// The library behind the device.
    pub fn library(&self) -> &Library {
        &self.0.backend.log.library
    }

    /// The chip's name in the library's words, such as `SM8850`, where the device was opened with
    /// [`LogLevel::Verbose`]: it stands in the log only.
    pub fn soc_name() -> Option<String> {
        log::soc_name()
    }

    pub(crate) fn raw(&self) -> Handle {
        self.0.raw.0
    }

    pub(crate) fn backend(&self) -> Handle {
        self.0.backend.raw.0
    }

    /// Takes note of what a call returned that needed the DSP.
    pub(crate) fn note(&self, status: sys::Status) {
        if codes::means_restart(codes::Code::of(status).0.into()) {
            self.0.lost.store(true, Ordering::Release);
        }
    }

    /// The DSP restarted: what is opened on this device fails.
    pub(crate) fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }

    /// Takes note of a context that was opened on this device.
    pub(crate) fn opened<C: OpenContext + 'static>(&self, context: &Arc<C>) {
        let mut contexts = self.0.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        contexts.retain(|context| context.strong_count() > 0);
        let context: Weak<C> = Arc::downgrade(context);
        contexts.push(context);
    }

    /// Frees every context of a device that is lost, whoever has it: their graphs say from then on that the device is
    /// lost. Waits until no other thread executes.
    pub(crate) fn close_contexts(&self) {
        let mut contexts = self.0.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        let contexts = std::mem::take(&mut *contexts);
        // The last ones may use a buffer of the first ones.
        for context in contexts.iter().rev().filter_map(Weak::upgrade) {
            context.close();
        }
    }

    /// The library's report about the machine.
    ///
    /// # Errors
    /// When the library does not report the platform.
    pub fn platform(&self) -> Result<Platform> {
        let library = self.library();
        let get =
            library.need(library.table().device_get_platform_info, "deviceGetPlatformInfo")?;
        let log = self.0.backend.log.raw.0;
        let mut info = std::ptr::null();
        // SAFETY: contract: handles, answers.
        let status = unsafe { get(log, &raw mut info) };
        codes::check(ErrorKind::Runtime, "asking for the platform", status)?;
        let mut platform = Platform {
            arch: None,
            soc: None,
            vtcm_mb: None,
            cores: 0,
            emulated: Platform::is_emulated(),
        };
        if info.is_null() {
            return Ok(platform);
        }
        // SAFETY: contract: answers, lists; the description lives until it is freed below.
        unsafe {
            if (*info).device_count > 0 && !(*info).devices.is_null() {
                let device = &*(*info).devices;
                platform.cores = device.core_count;
                if !device.extension.is_null() {
                    let extension = &*device.extension;
                    platform.arch = Some(extension.arch);
                    platform.soc = Some(extension.soc);
                    platform.vtcm_mb = Some(extension.vtcm_mb);
                }
            }
        }
        if let Some(free) = library.table().device_free_platform_info {
            // SAFETY: contract: handles; the description is this library's and not used any more.
            let status = unsafe { free(log, info) };
            if status != 0 {
                tracing::debug!(target: "qnn", status, "freeing the platform description failed");
            }
        }
        Ok(platform)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("library", self.library()).finish_non_exhaustive()
    }
}

fn create_device(backend: &BackendHandle, list: sys::ConfigList, attempt: &str) -> Result<Raw> {
    let library = &backend.log.library;
    let create = library.need(library.table().device_create, "deviceCreate")?;
    let mut raw = std::ptr::null_mut();
    let mark = log::mark();
    // SAFETY: contract: handles, arguments, answers.
    let status = unsafe { create(backend.log.raw.0, list, &raw mut raw) };
    check(attempt, status, mark, library)?;
    Ok(Raw(raw))
}

fn check(attempt: &str, status: u64, mark: u64, library: &Library) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    Err(causes::error(ErrorKind::Runtime, attempt, status, mark, library))
}

/// Builds the device configuration for `target` in the layout that the library expects, and hands
/// it to `call` for the time of the call.
fn with_target<T>(
    library: &Library,
    target: Target,
    call: impl FnOnce(sys::ConfigList) -> Result<T>,
) -> Result<T> {
    let values = [(sys::DEVICE_SOC, [target.soc, 0]), (sys::DEVICE_ARCH, [0, target.arch])];
    let wide = values.map(|(option, value)| sys::DeviceConfigWide { option, _reserved: 0, value });
    let narrow = values.map(|(option, value)| sys::DeviceConfigNarrow { option, value });
    let version = library.backend_version();
    let pointers: [*const c_void; 2] =
        if (version.major, version.minor) >= (5, sys::DEVICE_WIDE_SINCE) {
            [(&raw const wide[0]).cast(), (&raw const wide[1]).cast()]
        } else {
            [(&raw const narrow[0]).cast(), (&raw const narrow[1]).cast()]
        };
    let configs = pointers
        .map(|pointer| Config { option: sys::CONFIG_CUSTOM, value: ConfigValue { pointer } });
    let list = [&raw const configs[0], &raw const configs[1], std::ptr::null()];
    call(list.as_ptr())
}

impl LogHandle {
    fn create(library: &Library, level: LogLevel) -> Result<Self> {
        let create = library.need(library.table().log_create, "logCreate")?;
        let mut raw = std::ptr::null_mut();
        let mark = log::mark();
        // Warnings say why a device cannot be opened.
        let level = level.max(LogLevel::Warn);
        // SAFETY: contract: answers; the callback is a static function that any thread may call.
        let status = unsafe { create(log::callback, level.code(), &raw mut raw) };
        check("opening the QNN log", status, mark, library)?;
        Ok(Self { raw: Raw(raw), library: library.clone() })
    }
}

impl BackendHandle {
    fn create(log: LogHandle) -> Result<Self> {
        let library = &log.library;
        let create = library.need(library.table().backend_create, "backendCreate")?;
        let mut raw = std::ptr::null_mut();
        let mark = log::mark();
        // SAFETY: contract: handles, answers.
        let status = unsafe { create(log.raw.0, std::ptr::null(), &raw mut raw) };
        check("opening the QNN backend", status, mark, library)?;
        Ok(Self { raw: Raw(raw), log })
    }
}

impl Drop for DeviceHandle {
    fn drop(&mut self) {
        if let Some(free) = self.backend.log.library.table().device_free
            && !self.raw.0.is_null()
        {
            let _exclusive = Exclusive::begin();
            // SAFETY: contract: handles.
            freed("device", unsafe { free(self.raw.0) });
        }
    }
}

impl Drop for BackendHandle {
    fn drop(&mut self) {
        if let Some(free) = self.log.library.table().backend_free {
            let _exclusive = Exclusive::begin();
            // SAFETY: contract: handles.
            freed("backend", unsafe { free(self.raw.0) });
        }
    }
}

impl Drop for LogHandle {
    fn drop(&mut self) {
        if let Some(free) = self.library.table().log_free {
            let _exclusive = Exclusive::begin();
            // SAFETY: contract: handles.
            freed("log", unsafe { free(self.raw.0) });
        }
    }
}

/// A handle that cannot be freed is no reason to stop: say so.
pub(crate) fn freed(what: &str, status: sys::Status) {
    if status != 0 {
        tracing::warn!(target: "qnn", "freeing the {what}: {}", codes::Code::of(status));
    }
}
