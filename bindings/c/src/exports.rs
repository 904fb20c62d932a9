//! The functions of the header. Each is a line: what they do is elsewhere, and panics stop here.

#![expect(unsafe_code, reason = "gives functions their names in C")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use qhx::{CallerOptions, catch_panic};

use crate::abi::{
    GenCfg, GenerateOptions, Inputs, LastError, LogCallback, ModelHandle, Output, RuntimeHandle,
    RuntimeOptions, SessionHandle, Status, TokenCallback,
};
use crate::callbacks::Listener;
use crate::fault::{self, Fault, Result, guard};
use crate::handles::Table;
use crate::input;
use crate::model::Model;
use crate::output::{put, put_error, put_first, put_text};
use crate::runtime::Runtime;
use crate::session::Session;

static RUNTIMES: Table<Runtime> = Table::new("runtime");
static MODELS: Table<Model> = Table::new("model");
static SESSIONS: Table<Session> = Table::new("session");

/// Makes the runtime. NULL on failure.
// SAFETY, here and below: the names begin with the library's prefix, and the header declares these types.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_runtime_create(
    htp: *const c_char,
    system: *const c_char,
) -> *mut RuntimeHandle {
    guard(ptr::null_mut(), || {
        let htp = input::path("htp", htp)?;
        let system = input::path("system", system)?;
        RUNTIMES
            .add_only(|| Runtime::new(CallerOptions { htp, system, ..CallerOptions::default() }))
    })
}

/// Makes the runtime, with options. NULL on failure.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_runtime_create_ex(options: *const RuntimeOptions) -> *mut RuntimeHandle {
    guard(ptr::null_mut(), || {
        let question = input::runtime(options)?;
        RUNTIMES.add_only(|| Runtime::new(question))
    })
}

/// Writes the default options of a runtime.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_runtime_options_default(options: *mut RuntimeOptions) {
    put_first(options, RuntimeOptions::default(), RuntimeOptions::FIRST_SIZE);
}

/// Frees the runtime.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_runtime_free(runtime: *mut RuntimeHandle) {
    guard((), || free(runtime.is_null(), || RUNTIMES.remove(runtime)));
}

/// NULL is nothing to free.
fn free<T>(is_null: bool, remove: impl FnOnce() -> Result<T>) -> Result<()> {
    if is_null { Ok(()) } else { remove().map(drop) }
}

/// Writes what the device is.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_runtime_device(
    runtime: *mut RuntimeHandle,
    arch: *mut c_char,
    size: c_int,
    soc: *mut c_int,
    htp: *mut c_int,
) {
    let device = guard(Default::default(), || RUNTIMES.get(runtime)?.device());
    let number = |n: Option<u32>| n.and_then(|n| c_int::try_from(n).ok()).unwrap_or(0);
    put_text(arch, size, &device.arch.map_or(String::new(), |arch| format!("v{arch}")));
    put(soc, number(device.soc));
    put(htp, number(device.arch));
}

/// Opens a bundle. NULL on failure.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_model_load(
    runtime: *mut RuntimeHandle,
    manifest: *const c_char,
    artifacts: *const c_char,
) -> *mut ModelHandle {
    guard(ptr::null_mut(), || {
        let runtime = RUNTIMES.get(runtime)?;
        let manifest = input::path("manifest", manifest)?
            .ok_or_else(|| Fault::usage("manifest is NULL, expected a path"))?;
        let artifacts = input::path("artifacts", artifacts)?;
        Ok(MODELS.add(runtime.load(&manifest, artifacts.as_deref())?))
    })
}

/// Frees a model.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_model_free(model: *mut ModelHandle) {
    guard((), || free(model.is_null(), || MODELS.remove(model)));
}

/// Opens a session. NULL on failure.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_session_create(model: *mut ModelHandle) -> *mut SessionHandle {
    guard(ptr::null_mut(), || Ok(SESSIONS.add(Session::new(MODELS.get(model)?)?)))
}

/// Frees a session, once what it does has ended.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_session_free(session: *mut SessionHandle) {
    guard((), || {
        free(session.is_null(), || {
            SESSIONS.get(session)?.check_not_within()?;
            SESSIONS.remove(session)?.end();
            Ok(())
        })
    });
}

/// Forgets what a session consumed.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_session_reset(session: *mut SessionHandle) {
    guard((), || SESSIONS.get(session)?.reset());
}

/// Ends the generation under way.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_session_cancel(session: *mut SessionHandle) {
    guard((), || {
        SESSIONS.get(session)?.cancel();
        Ok(())
    });
}

/// Positions that a session consumed; -1 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_session_position(session: *mut SessionHandle) -> i64 {
    guard(-1, || Ok(i64::try_from(SESSIONS.get(session)?.position()?).unwrap_or(i64::MAX)))
}

/// Writes where what a session consumed lies as bytes.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_session_export(
    session: *mut SessionHandle,
    bytes: *mut *const c_void,
    size: *mut usize,
) -> Status {
    let (status, (data, len)) = read_of(session, (ptr::null(), 0), |session| {
        if bytes.is_null() || size.is_null() {
            return Err(Fault::usage("bytes or size is NULL, expected where to write them"));
        }
        session.export()
    });
    put(bytes, data.cast());
    put(size, len);
    status
}

/// Has a session go on from such bytes.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_session_import(
    session: *mut SessionHandle,
    bytes: *const c_void,
    size: usize,
) -> Status {
    catch_panic(|| SESSIONS.get(session)?.import(input::state(bytes, size)?))
        .map_or_else(|fault| fault::remember(&fault), |()| 0)
}

/// Writes why the last answer of a session ended, and the stop string that ended it.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_session_last_stop(
    session: *mut SessionHandle,
    reason: *mut *const c_char,
    text: *mut *const c_char,
) -> Status {
    let (status, (why, stop)) = read_of(session, (ptr::null(), ptr::null()), |session| {
        session.last(|held| Ok(held.stop()))
    });
    put(reason, why);
    put(text, stop);
    status
}

/// Words of the last transcription of a session; -1 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_session_last_n_words(session: *mut SessionHandle) -> c_int {
    guard(-1, || {
        let count = SESSIONS.get(session)?.last(|held| Ok(held.words()))?;
        Ok(c_int::try_from(count).unwrap_or(c_int::MAX))
    })
}

/// Writes a word of the last transcription of a session, and when it begins and ends.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_session_last_word(
    session: *mut SessionHandle,
    index: c_int,
    text: *mut *const c_char,
    start: *mut f64,
    end: *mut f64,
) -> Status {
    let (status, (word, from, to)) =
        read_of(session, (ptr::null(), 0.0, 0.0), |session| session.last(|held| held.word(index)));
    put(text, word);
    put(start, from);
    put(end, to);
    status
}

/// Value read from a session, or `otherwise` with the status of the failure.
fn read_of<T>(
    session: *mut SessionHandle,
    otherwise: T,
    read: impl FnOnce(&Session) -> Result<T>,
) -> (Status, T) {
    match catch_panic(|| read(&*SESSIONS.get(session)?)) {
        Ok(found) => (0, found),
        Err(fault) => (fault::remember(&fault), otherwise),
    }
}

/// Writes how tokens are chosen by default.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_gen_cfg_default(cfg: *mut GenCfg) {
    put(cfg, GenCfg::default());
}

/// Writes the default options of a generation.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_generate_options_default(options: *mut GenerateOptions) {
    put_first(options, GenerateOptions::default(), GenerateOptions::FIRST_SIZE);
}

/// Generates.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_generate(
    session: *mut SessionHandle,
    inputs: *const Inputs,
    cfg: *const GenCfg,
    callback: TokenCallback,
    user: *mut c_void,
    output: *mut Output,
) -> Status {
    qhx_generate_ex(session, inputs, cfg, ptr::null(), callback, user, output)
}

/// Generates, with options.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_generate_ex(
    session: *mut SessionHandle,
    inputs: *const Inputs,
    cfg: *const GenCfg,
    options: *const GenerateOptions,
    callback: TokenCallback,
    user: *mut c_void,
    output: *mut Output,
) -> Status {
    let generated = catch_panic(|| {
        let session = SESSIONS.get(session)?;
        let options = input::options(options)?;
        let question = input::question(inputs, cfg, &options)?;
        session.generate(question, input::poll(&options), &mut Listener::new(callback, user))
    });
    let written = generated.unwrap_or_else(|fault| Output::empty(fault::remember(&fault)));
    put(output, written);
    written.status
}

/// A sentence on a status.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_status_str(status: Status) -> *const c_char {
    let text: &CStr = match status {
        0 => c"ok",
        2 => c"an argument makes no sense",
        3 => c"the manifest is missing or invalid",
        4 => c"a file of the bundle is missing, cut short, or not what it claims to be",
        5 => c"a QNN library is missing, or is none",
        6 => c"a context binary does not load on this device",
        7 => c"a graph or tensor is missing, or has another shape",
        8 => c"a plugin is missing, incompatible, or misbehaved",
        9 => c"the prompt is empty, too long, or of an unknown modality",
        10 => c"executing a graph failed",
        11 => c"reading failed outside the bundle",
        12 => c"the device restarted",
        13 => c"a host-op panicked",
        14 => c"a handle is NULL, freed, or none of this library",
        15 => c"the session or the runtime is in use",
        70 => c"a fault of the library",
        130 => c"cancelled",
        _ => c"unknown status",
    };
    text.as_ptr()
}

/// The version.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(text) => text,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// Writes the last error of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_last_error(error: *mut LastError) -> Status {
    // Not remembered: the last error is the one that is asked for.
    let put = || fault::with_last(|last| put_error(error, last));
    catch_panic(put).map_or_else(|fault| fault.status, |()| 0)
}

/// Sets who gets what is logged.
#[unsafe(no_mangle)]
pub extern "C" fn qhx_log_set(callback: LogCallback, user: *mut c_void, level: c_int) -> Status {
    catch_panic(|| crate::log::set(callback, user, level))
        .map_or_else(|fault| fault::remember(&fault), |()| 0)
}
