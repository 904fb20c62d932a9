//! The tests' side: sets the plan of the library in this process and reads its report.

#![expect(unsafe_code, reason = "loads the library and calls its functions")]

use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};

use crate::{Plan, Report};

/// The library in this process.
#[derive(Debug)]
pub struct Control {
    file: PathBuf,
    library: libloading::Library,
}

impl Control {
    /// Path of the library that belongs to the running test: cargo puts it beside the test.
    ///
    /// # Errors
    /// The test has no path, or there is no library.
    pub fn file() -> Result<PathBuf, String> {
        let test = std::env::current_exe().map_err(|e| e.to_string())?;
        let file = test.with_file_name("libqhx_fake_device.so");
        if file.is_file() { Ok(file) } else { Err(format!("{} is missing", file.display())) }
    }

    /// Opens the library: the same that qhx then opens by this path.
    ///
    /// # Errors
    /// It is not there or cannot be loaded.
    pub fn open() -> Result<Self, String> {
        let file = Self::file()?;
        // SAFETY: the library has no initialisers.
        let library = unsafe { libloading::Library::new(&file) }.map_err(|e| e.to_string())?;
        Ok(Self { file, library })
    }

    /// Its file, to be given as libQnnHtp and as libcdsprpc.
    pub fn path(&self) -> &Path {
        &self.file
    }

    /// Sets the plan and zeroes all counts.
    ///
    /// # Errors
    /// The library does not take it.
    pub fn set(&self, plan: &Plan) -> Result<(), String> {
        let text = serde_json::to_string(plan).map_err(|e| e.to_string())?;
        let text = CString::new(text).map_err(|e| e.to_string())?;
        type Set = unsafe extern "C" fn(*const c_char) -> i32;
        // SAFETY: the library exports the function with this signature.
        let set = unsafe { self.library.get::<Set>(b"qhx_fake_plan\0") };
        let set = set.map_err(|e| e.to_string())?;
        // SAFETY: the text ends with NUL and lives during the call.
        match unsafe { set(text.as_ptr()) } {
            0 => Ok(()),
            _ => Err(format!("the library does not take the plan {plan:?}")),
        }
    }

    /// Report of what happened since the plan was set.
    ///
    /// # Errors
    /// The library returns something else.
    pub fn report(&self) -> Result<Report, String> {
        // SAFETY: the library exports the function with this signature.
        let get = unsafe {
            self.library.get::<unsafe extern "C" fn() -> *mut c_char>(b"qhx_fake_report\0")
        };
        let get = get.map_err(|e| e.to_string())?;
        // SAFETY: as above.
        let free =
            unsafe { self.library.get::<unsafe extern "C" fn(*mut c_char)>(b"qhx_fake_free\0") };
        let free = free.map_err(|e| e.to_string())?;
        // SAFETY: takes nothing.
        let text = unsafe { get() };
        if text.is_null() {
            return Err("the library gives no report".to_owned());
        }
        // SAFETY: a text of the library that ends with NUL, until it is freed below.
        let report = serde_json::from_slice(unsafe { CStr::from_ptr(text) }.to_bytes());
        // SAFETY: it is the library's and not used any more.
        unsafe { free(text) };
        report.map_err(|e| e.to_string())
    }

    /// The report, when all is closed.
    ///
    /// # Panics
    /// Something is left, or a rule was broken: `label` says when.
    #[track_caller]
    pub fn closed(&self, label: &str) -> Report {
        let report = self.report();
        assert!(report.is_ok(), "{label}: {report:?}");
        let report = report.unwrap_or_default();
        assert!(report.alive.is_empty(), "{label}: left over: {:?}", report.alive);
        assert!(report.violations.is_empty(), "{label}: {:?}", report.violations);
        report
    }
}
