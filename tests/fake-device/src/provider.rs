//! The provider's functions: each hands its call on to the real library through [`call`].

#![expect(
    unsafe_code,
    reason = "stands in for functions of the QNN library, and exports its entry point"
)]

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use qhx_qnn_sys::{
    self as sys, ConfigList, CoreTable, EventData, GetProviders, Handle, Infrastructure,
    LogCallback, MemDescriptor, OpConfig, PlatformInfo, Provider, Status, Tensor,
};

use crate::state::{Effect, Key, Kind, call, key, with, write_report};
use crate::{Chip, Plan, groups, memory, power};

/// The functions of the real library.
static REAL: OnceLock<CoreTable> = OnceLock::new();

/// A provider of our own: head and table, and the list that names it.
struct Ours {
    list: [*const Provider; 1],
    _provider: Box<[*const c_void]>,
}

// SAFETY: nothing writes it once it is made.
unsafe impl Send for Ours {}

/// The answer where the real library lacks a function.
const NOT_SUPPORTED: Status = 1000;
const NO_INTERFACE: Status = 60000;

/// Defines functions that hand on. In brackets what is used; then what is made or freed, if anything.
macro_rules! handed_on {
    ($($field:ident $name:literal ($($arg:ident: $type:ty),* $(,)?) [$($kind:ident $used:expr),*]
        $(makes $made:ident $out:ident from ($parent:expr))? $(frees $freed:ident $gone:ident)?;)*) => {
        $(unsafe extern "C" fn $field($($arg: $type),*) -> Status {
            let Some(real) = REAL.get().and_then(|real| real.$field) else { return NOT_SUPPORTED };
            let uses: &[Key] = &[$(key(Kind::$kind, $used)),*];
            let effect = handed_on!(@effect $(makes $made from ($parent))? $(frees $freed $gone)?);
            call($name, uses, effect, || {
                // SAFETY: as the caller of this function vouches.
                let status = unsafe { real($($arg),*) };
                (status, handed_on!(@made status $($out)?))
            })
        })*

        /// The real table with these functions in the place of its own.
        fn ours(real: &CoreTable) -> CoreTable {
            let mut table = *real;
            $(table.$field = real.$field.map(|_| $field as _);)*
            table.context_create_from_binary =
                real.context_create_from_binary.map(|_| context_create_from_binary as _);
            table.graph_execute = real.graph_execute.map(|_| graph_execute as _);
            table.mem_register = Some(mem_register);
            table.mem_deregister = Some(mem_deregister);
            table.device_get_infrastructure =
                real.device_get_infrastructure.map(|_| device_get_infrastructure as _);
            table.device_get_platform_info =
                real.device_get_platform_info.map(|_| device_get_platform_info as _);
            table.device_free_platform_info =
                real.device_free_platform_info.map(|_| device_free_platform_info as _);
            table
        }
    };
    (@effect) => { Effect::None };
    (@effect makes $made:ident from ($parent:expr)) => { Effect::Makes(Kind::$made, $parent.0, $parent.1) };
    (@effect frees $freed:ident $gone:ident) => { Effect::Frees(key(Kind::$freed, $gone)) };
    (@made $status:ident) => { 0 };
    (@made $status:ident $out:ident) => {
        // SAFETY: where the call succeeded, the library wrote the handle.
        if $status == 0 { unsafe { (*$out).addr() } } else { 0 }
    };
}

/// Parent that a handle is made from, and the number of bytes of its binary.
fn from(kind: Kind, parent: Handle, bytes: u64) -> (Option<Key>, u64) {
    ((!parent.is_null()).then(|| key(kind, parent)), bytes)
}

handed_on! {
    backend_create "backendCreate" (log: Handle, configs: ConfigList, out: *mut Handle) [Log log]
        makes Backend out from (from(Kind::Log, log, 0));
    backend_get_build_id "backendGetBuildId" (id: *mut *const c_char) [];
    backend_free "backendFree" (backend: Handle) [Backend backend] frees Backend backend;
    context_create "contextCreate" (backend: Handle, device: Handle, configs: ConfigList, out: *mut Handle)
        [Backend backend, Device device] makes Context out from (from(Kind::Backend, backend, 0));
    context_get_binary_size "contextGetBinarySize" (context: Handle, size: *mut u64) [Context context];
    context_get_binary "contextGetBinary" (context: Handle, to: *mut c_void, size: u64, written: *mut u64)
        [Context context];
    context_free "contextFree" (context: Handle, profile: Handle) [Context context, Profile profile]
        frees Context context;
    graph_create "graphCreate" (context: Handle, name: *const c_char, configs: ConfigList, out: *mut Handle)
        [Context context] makes Graph out from (from(Kind::Context, context, 0));
    graph_add_node "graphAddNode" (graph: Handle, op: OpConfig) [Graph graph];
    graph_finalize "graphFinalize" (graph: Handle, profile: Handle, signal: Handle)
        [Graph graph, Profile profile];
    graph_retrieve "graphRetrieve" (context: Handle, name: *const c_char, out: *mut Handle)
        [Context context] makes Graph out from (from(Kind::Context, context, 0));
    tensor_create_graph_tensor "tensorCreateGraphTensor" (graph: Handle, tensor: *mut Tensor) [Graph graph];
    log_create "logCreate" (callback: LogCallback, level: u32, out: *mut Handle) []
        makes Log out from (from(Kind::Log, std::ptr::null_mut(), 0));
    log_free "logFree" (log: Handle) [Log log] frees Log log;
    profile_create "profileCreate" (backend: Handle, level: u32, out: *mut Handle) [Backend backend]
        makes Profile out from (from(Kind::Backend, backend, 0));
    profile_get_events "profileGetEvents" (profile: Handle, ids: *mut *const u64, count: *mut u32)
        [Profile profile];
    profile_get_sub_events "profileGetSubEvents" (id: u64, ids: *mut *const u64, count: *mut u32) [];
    profile_get_event_data "profileGetEventData" (id: u64, data: *mut EventData) [];
    profile_free "profileFree" (profile: Handle) [Profile profile] frees Profile profile;
    device_create "deviceCreate" (log: Handle, configs: ConfigList, out: *mut Handle) [Log log]
        makes Device out from (from(Kind::Log, log, 0));
    device_free "deviceFree" (device: Handle) [Device device] frees Device device;
    error_get_message "errorGetMessage" (code: u64, text: *mut *const c_char) [];
}

unsafe extern "C" fn context_create_from_binary(
    backend: Handle,
    device: Handle,
    configs: ConfigList,
    bytes: *const c_void,
    size: u64,
    out: *mut Handle,
    profile: Handle,
) -> Status {
    let real = REAL.get().and_then(|real| real.context_create_from_binary);
    let Some(real) = real else { return NOT_SUPPORTED };
    let uses =
        [key(Kind::Backend, backend), key(Kind::Device, device), key(Kind::Profile, profile)];
    let effect = Effect::Makes(Kind::Context, Some(key(Kind::Backend, backend)), size);
    let mut group = None;
    let status = call("contextCreateFromBinary", &uses, effect, || {
        // SAFETY: as the caller of this function vouches.
        let (rest, asked) = unsafe { groups::split(configs) };
        group = asked.filter(|_| with(|state| state.groups()));
        let configs = match group {
            Some(_) if rest.len() > 1 => rest.as_ptr(),
            Some(_) => std::ptr::null(),
            None => configs,
        };
        // SAFETY: as the caller of this function vouches, with some of its list.
        unsafe {
            let status = real(backend, device, configs, bytes, size, out, profile);
            (status, if status == 0 { (*out).addr() } else { 0 })
        }
    });
    if let (0, Some(group)) = (status, group) {
        // SAFETY: the call succeeded, and the library wrote the handle.
        with(|state| state.group(unsafe { (*out).addr() }, group));
    }
    status
}

unsafe extern "C" fn graph_execute(
    graph: Handle,
    inputs: *const Tensor,
    input_count: u32,
    outputs: *mut Tensor,
    output_count: u32,
    profile: Handle,
    signal: Handle,
) -> Status {
    let Some(real) = REAL.get().and_then(|real| real.graph_execute) else { return NOT_SUPPORTED };
    let uses = [key(Kind::Graph, graph), key(Kind::Profile, profile)];
    call("graphExecute", &uses, Effect::None, || {
        let resolved = with(|state| {
            let context = state.context_of(graph);
            // SAFETY: the caller of this function vouches for the lists.
            let lists = unsafe { [slice(inputs, input_count), slice(outputs, output_count)] };
            let [inputs, outputs] = lists.map(|list| {
                list.iter()
                    .map(|tensor| state.resolve(context, tensor))
                    .collect::<Result<Vec<_>, _>>()
            });
            state.report.executions += 1;
            Ok::<_, Status>((inputs?, outputs?))
        });
        let (inputs, mut outputs) = match resolved {
            Ok(tensors) => tensors,
            Err(status) => return (status, 0),
        };
        // SAFETY: as the caller of this function vouches, with copies of its lists.
        let status = unsafe {
            real(
                graph,
                inputs.as_ptr(),
                input_count,
                outputs.as_mut_ptr(),
                output_count,
                profile,
                signal,
            )
        };
        (status, 0)
    })
}

/// # Safety
/// `values` leads to `count` of them, or is NULL.
unsafe fn slice<'a, T>(values: *const T, count: u32) -> &'a [T] {
    if values.is_null() {
        return &[];
    }
    // SAFETY: the caller vouches for it.
    unsafe { std::slice::from_raw_parts(values, count as usize) }
}

unsafe extern "C" fn mem_register(
    context: Handle,
    descriptors: *const MemDescriptor,
    count: u32,
    handles: *mut Handle,
) -> Status {
    call("memRegister", &[key(Kind::Context, context)], Effect::None, || {
        // SAFETY: as the caller of this function vouches.
        (unsafe { memory::register(context, descriptors, count, handles) }, 0)
    })
}

unsafe extern "C" fn mem_deregister(handles: *const Handle, count: u32) -> Status {
    let mut freed = 0;
    let status = call("memDeRegister", &[], Effect::None, || {
        freed = 1;
        // SAFETY: as the caller of this function vouches.
        (unsafe { memory::deregister(handles, count) }, 0)
    });
    if freed == 0 {
        // A call that is made to fail ends the registration all the same.
        // SAFETY: as above.
        unsafe { memory::deregister(handles, count) };
    }
    status
}

unsafe extern "C" fn device_get_infrastructure(out: *mut *const Infrastructure) -> Status {
    let real = REAL.get().and_then(|real| real.device_get_infrastructure);
    let Some(real) = real else { return NOT_SUPPORTED };
    call("deviceGetInfrastructure", &[], Effect::None, || {
        // SAFETY: as the caller of this function vouches; the table stays.
        unsafe {
            let status = real(out);
            if status == 0 && !(*out).is_null() {
                *out = power::wrap(*out);
            }
            (status, 0)
        }
    })
}

unsafe extern "C" fn device_get_platform_info(
    log: Handle,
    out: *mut *const PlatformInfo,
) -> Status {
    let real = REAL.get().and_then(|real| real.device_get_platform_info);
    let Some(real) = real else { return NOT_SUPPORTED };
    let effect = Effect::Makes(Kind::Platform, Some(key(Kind::Log, log)), 0);
    call("deviceGetPlatformInfo", &[key(Kind::Log, log)], effect, || {
        // SAFETY: as the caller of this function vouches.
        unsafe {
            let status = real(log, out);
            if let (0, Some(chip)) = (status, with(|state| state.chip())) {
                describe(*out, chip);
            }
            (status, if status == 0 { (*out).addr() } else { 0 })
        }
    })
}

/// Writes another chip into the real library's description of its device.
///
/// # Safety
/// `info` is a description that the library has just made for this caller, or NULL.
unsafe fn describe(info: *const PlatformInfo, chip: Chip) {
    // SAFETY: the library's own description, which nobody else has; its lists have as many entries as it says.
    unsafe {
        if info.is_null() || (*info).device_count == 0 || (*info).devices.is_null() {
            return;
        }
        let extension = (*(*info).devices).extension.cast_mut();
        if !extension.is_null() {
            (*extension).arch = chip.arch;
            (*extension).soc = chip.soc;
            (*extension).vtcm_mb = chip.vtcm_mb;
        }
    }
}

unsafe extern "C" fn device_free_platform_info(log: Handle, info: *const PlatformInfo) -> Status {
    let real = REAL.get().and_then(|real| real.device_free_platform_info);
    let Some(real) = real else { return NOT_SUPPORTED };
    let gone = (Kind::Platform, info.addr());
    call("deviceFreePlatformInfo", &[key(Kind::Log, log), gone], Effect::Frees(gone), || {
        // SAFETY: as the caller of this function vouches.
        (unsafe { real(log, info) }, 0)
    })
}

/// The entry point of libQnnHtp.
#[unsafe(no_mangle)]
unsafe extern "C" fn QnnInterface_getProviders(
    list: *mut *const *const Provider,
    count: *mut u32,
) -> Status {
    static OURS: Mutex<Option<Ours>> = Mutex::new(None);
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    if ours.is_none() {
        match open() {
            Ok(opened) => *ours = Some(opened),
            Err(status) => return status,
        }
    }
    let Some(ours) = ours.as_ref() else { return NO_INTERFACE };
    // SAFETY: the caller vouches for the places of the answer; what it leads to is never moved.
    unsafe {
        *list = ours.list.as_ptr();
        *count = 1;
    }
    0
}

/// Opens the real library and makes a provider of its first one.
fn open() -> Result<Ours, Status> {
    let path = std::env::var_os("QHX_FAKE_REAL").or_else(|| std::env::var_os("QHX_QNN_HTP"));
    let path = path.ok_or(NO_INTERFACE)?;
    // SAFETY: the user names a QNN library.
    let library = unsafe { libloading::Library::new(path) }.map_err(|_| NO_INTERFACE)?;
    // Its threads have no moment at which they are known to be through.
    let library = std::mem::ManuallyDrop::new(library);
    // SAFETY: the documented entry point of these libraries.
    let get = unsafe { library.get::<GetProviders<Provider>>(sys::CORE_ENTRY.as_bytes()) };
    let get = *get.map_err(|_| NO_INTERFACE)?;
    let own: GetProviders<Provider> = QnnInterface_getProviders;
    if std::ptr::fn_addr_eq(get, own) {
        // Without a real library it would wait for itself.
        return Err(NO_INTERFACE);
    }
    let (mut list, mut count) = (std::ptr::null(), 0);
    // SAFETY: room for the answer.
    let status = unsafe { get(&raw mut list, &raw mut count) };
    if status != 0 {
        return Err(status);
    }
    if list.is_null() || count == 0 {
        return Err(NO_INTERFACE);
    }
    // SAFETY: the library answered with a list of providers, each with its head.
    let (real, version) = unsafe { (*list, (**list).core) };
    if version.major != 2 || version.minor < sys::CORE_FLOOR {
        return Err(NO_INTERFACE);
    }
    const HEAD: usize = size_of::<Provider>() / size_of::<*const c_void>();
    let words = HEAD + sys::core_slots(version.minor);
    // SAFETY: head and table lie one behind the other, the table has at least that number of slots, and all
    // of it is words of pointer size.
    let mut provider: Box<[*const c_void]> =
        unsafe { std::slice::from_raw_parts(real.cast(), words) }.into();
    // SAFETY: the version is one that the table is known of.
    let table = unsafe { CoreTable::of(real, version) };
    ours(&table).write(&mut provider[HEAD..]);
    let _ = REAL.set(table);
    set_plan_of_environment();
    // SAFETY: a function without arguments that does not unwind.
    unsafe { libc::atexit(at_exit) };
    Ok(Ours { list: [provider.as_ptr().cast()], _provider: provider })
}

fn set_plan_of_environment() {
    let Some(path) = std::env::var_os("QHX_FAKE_PLAN") else { return };
    let plan = std::fs::read(path).map_err(|e| e.to_string());
    let plan =
        plan.and_then(|text| serde_json::from_slice::<Plan>(&text).map_err(|e| e.to_string()));
    with(|state| match plan {
        Ok(plan) => state.set(plan),
        Err(why) => state.violation(format!("QHX_FAKE_PLAN: {why}")),
    });
}

extern "C" fn at_exit() {
    write_report();
    while with(|state| state.report.hanging > 0) {
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
}

/// Sets the plan, a JSON text. 0 when it is one.
#[unsafe(no_mangle)]
unsafe extern "C" fn qhx_fake_plan(text: *const c_char) -> i32 {
    // SAFETY: the caller vouches for a text that ends with NUL.
    let plan = serde_json::from_slice(unsafe { CStr::from_ptr(text) }.to_bytes());
    plan.map_or(1, |plan| {
        with(|state| state.set(plan));
        0
    })
}

/// The report as JSON, to be freed with [`qhx_fake_free`]; NULL when there is none.
#[unsafe(no_mangle)]
extern "C" fn qhx_fake_report() -> *mut c_char {
    let report = serde_json::to_string(&with(|state| state.report())).ok();
    report.and_then(|text| CString::new(text).ok()).map_or(std::ptr::null_mut(), CString::into_raw)
}

/// Frees a report.
#[unsafe(no_mangle)]
unsafe extern "C" fn qhx_fake_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller vouches that it came from `qhx_fake_report`.
        drop(unsafe { CString::from_raw(text) });
    }
}
