//! Names, meanings and fixes of the numbers that the QNN libraries return.

use std::fmt;

use qhx_base::{Error, ErrorKind, Result};

use qhx_qnn_sys as sys;

/// The code in the low 16 bits of a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Code(pub u16);

struct Entry {
    code: u16,
    name: &'static str,
    meaning: &'static str,
    fix: Option<&'static str>,
}

const fn entry(code: u16, name: &'static str, meaning: &'static str) -> Entry {
    Entry { code, name, meaning, fix: None }
}

const fn fixed(code: u16, name: &'static str, meaning: &'static str, fix: &'static str) -> Entry {
    Entry { code, name, meaning, fix: Some(fix) }
}

/// Memory could not be had.
pub const MEM_ALLOC: u64 = sys::STATUS_MEM_ALLOC as u64;

/// The connection to the DSP broke, and can be opened again.
const RESTARTED: u16 = 1007;
/// The connection to the DSP broke, as the library sees it for good.
const RESTARTED_FATAL: u16 = 1011;

/// True for the codes of a DSP that restarted: every context is gone and has to be opened again.
pub fn means_restart(code: u64) -> bool {
    [RESTARTED, RESTARTED_FATAL].map(u64::from).contains(&code)
}

/// For codes that say little.
const LOOK: &str = "run it again with --log warn,qnn=debug and read what the library itself says";

const SKEL: &str = "set ADSP_LIBRARY_PATH to the folder with the libQnnHtpV*Skel.so of this \
    device, and close other programs that use the NPU; a process has about 3.5 GB of it, which the \
    contexts of a bundle can take in turn (--max-contexts)";
const RECREATE: &str = "the DSP restarted: open the bundle again";
const RESTART: &str = "restart the process; if it persists, reboot the device";
const REBUILD: &str = "rebuild the context with a QAIRT version that is not newer than the runtime \
    libraries, or update the libraries";
const DAMAGED: &str = "the file is damaged or not a context binary; download it again and compare \
    its hash";

/// Sorted by code.
const ENTRIES: &[Entry] = &[
    entry(1000, "NOT_SUPPORTED", "the library does not support this here"),
    fixed(1002, "MEM_ALLOC", "memory could not be had, or no process domain could be opened", SKEL),
    entry(1003, "SYSTEM", "a system call failed"),
    entry(1004, "INVALID_ARGUMENT", "an argument is not valid"),
    entry(1005, "OPERATION_NOT_PERMITTED", "the call is not allowed at this point"),
    fixed(
        1006,
        "PLATFORM_NOT_SUPPORTED",
        "the library does not know this platform",
        "use the libraries of a QAIRT version that supports the chip",
    ),
    fixed(RESTARTED, "SYSTEM_COMMUNICATION", "the connection to the DSP broke", RECREATE),
    fixed(
        1008,
        "INCOMPATIBLE_BINARIES",
        "libQnnHtp and the stub or skel library beside it are of different versions",
        "take libQnnHtp.so, libQnnHtpV*Stub.so and libQnnHtpV*Skel.so from one QAIRT version",
    ),
    fixed(
        1009,
        "LOADING_BINARIES",
        "the stub or skel library could not be loaded",
        "put libQnnHtpV*Stub.so beside libQnnHtp.so and point ADSP_LIBRARY_PATH at \
         libQnnHtpV*Skel.so",
    ),
    entry(1010, "RESOURCE_UNAVAILABLE", "a resource is in use"),
    fixed(
        RESTARTED_FATAL,
        "SYSTEM_COMMUNICATION_FATAL",
        "the connection to the DSP broke for good",
        RESTART,
    ),
    entry(1100, "GENERAL", "the library gives no reason"),
    entry(2000, "UNKNOWN_PROPERTY", "the library does not know this property"),
    entry(2001, "INVALID_PROPERTY", "the property is not valid"),
    entry(3000, "OP_PACKAGE", "an op package could not be registered"),
    fixed(
        4000,
        "BACKEND_CANNOT_INITIALIZE",
        "the backend could not be initialised",
        "log at level debug and read the library's own lines",
    ),
    entry(4002, "BACKEND_INVALID_ARGUMENT", "an argument for the backend is not valid"),
    entry(4003, "BACKEND_NOT_SUPPORTED", "the backend does not support this"),
    entry(4004, "BACKEND_INVALID_OP", "the backend does not accept an op"),
    entry(4005, "BACKEND_ALREADY_REGISTERED", "the op package is registered already"),
    entry(4006, "BACKEND_OP_PACKAGE_NOT_FOUND", "the op package was not found"),
    entry(4007, "BACKEND_OP_PACKAGE_INTERFACE", "the op package has no usable interface"),
    entry(4008, "BACKEND_OP_PACKAGE_REGISTRATION", "the op package could not be registered"),
    entry(4009, "BACKEND_OP_PACKAGE_CONFIG", "the op package does not validate the op"),
    entry(4010, "BACKEND_OP_PACKAGE_DUPLICATE", "an op package of that name is registered"),
    entry(4011, "BACKEND_INVALID_HANDLE", "the backend is closed already"),
    entry(4012, "BACKEND_INVALID_CONFIG", "a backend option is not accepted"),
    entry(4013, "BACKEND_OP_PACKAGE_LOAD", "an op package could not be loaded from memory"),
    entry(5000, "CONTEXT_INVALID_ARGUMENT", "an argument for the context is not valid"),
    entry(5001, "CONTEXT_DOES_NOT_EXIST", "the context does not exist"),
    entry(5002, "CONTEXT_INVALID_HANDLE", "the context is closed already"),
    entry(5003, "CONTEXT_NOT_FINALIZED", "a graph of the context is not finalised"),
    fixed(5004, "CONTEXT_BINARY_VERSION", "the binary's version is not accepted", REBUILD),
    fixed(
        5005,
        "CONTEXT_CREATE_FROM_BINARY",
        "the context could not be created from the binary",
        "the binary may be made for another architecture (compare `qhx inspect` with the device), \
         be damaged, or be made by a newer QAIRT",
    ),
    entry(5006, "CONTEXT_GET_BINARY_SIZE", "the size of the binary could not be computed"),
    entry(5007, "CONTEXT_GET_BINARY", "the binary could not be written"),
    fixed(
        5008,
        "CONTEXT_BINARY_CONFIGURATION",
        "the binary's configuration is not accepted",
        REBUILD,
    ),
    entry(5009, "CONTEXT_SET_PROFILE", "the profile could not be set"),
    entry(5010, "CONTEXT_INVALID_CONFIG", "a context option is not accepted"),
    entry(5011, "CONTEXT_BINARY_SUBOPTIMAL", "the binary runs here, but not as fast as it could"),
    entry(5012, "CONTEXT_ABORTED", "the call was aborted"),
    entry(5013, "CONTEXT_TIMED_OUT", "the call took longer than allowed"),
    entry(5014, "CONTEXT_INCREMENT_INVALID_BUFFER", "a part of the binary is not valid"),
    entry(6000, "GRAPH_INVALID_ARGUMENT", "an argument for the graph is not valid"),
    entry(6001, "GRAPH_INVALID_HANDLE", "the graph's context is closed already"),
    entry(6002, "GRAPH_DOES_NOT_EXIST", "the graph does not exist"),
    entry(6003, "GRAPH_INVALID_NAME", "no graph has that name, or the name is taken"),
    entry(6004, "GRAPH_INVALID_TENSOR", "a tensor is missing, has another shape, or no data"),
    entry(6005, "GRAPH_INVALID_OP_CONFIG", "an op's inputs, outputs or parameters do not fit it"),
    entry(6006, "GRAPH_SET_PROFILE", "the profile could not be set"),
    entry(6007, "GRAPH_UNCONNECTED_NODE", "a node's input is the output of no other node"),
    entry(6020, "GRAPH_CREATE_FAILED", "the graph could not be created"),
    fixed(
        6021,
        "GRAPH_OPTIMIZATION_FAILED",
        "the graph compiler could not optimise the graph",
        "an op or shape may not be supported on this target",
    ),
    fixed(
        6022,
        "GRAPH_FINALIZE_FAILED",
        "the graph compiler could not finish the graph",
        "an op or shape may not be supported on this target",
    ),
    entry(6023, "GRAPH_NOT_FINALIZED", "the graph is not finalised"),
    entry(6024, "GRAPH_FINALIZED", "the graph is finalised already"),
    entry(6025, "GRAPH_ASYNC_FIFO_FULL", "too many executions are queued"),
    entry(6030, "GRAPH_SIGNAL_IN_USE", "the signal is in use"),
    entry(6031, "GRAPH_ABORTED", "the execution was aborted"),
    entry(6032, "GRAPH_PROFILE_IN_USE", "the profile is in use by another graph"),
    entry(6033, "GRAPH_TIMED_OUT", "the execution took longer than allowed"),
    entry(6034, "GRAPH_SUBGRAPH", "a subgraph cannot be used like this"),
    entry(6035, "GRAPH_DISABLED", "the graph was not enabled when the context was loaded"),
    entry(6036, "GRAPH_DYNAMIC_TENSOR_SHAPE", "a dynamic shape is not accepted"),
    entry(6037, "GRAPH_TENSOR_SPARSITY", "a sparse tensor is not accepted"),
    entry(6038, "GRAPH_EARLY_TERMINATION", "the execution ended early"),
    entry(6039, "GRAPH_INVALID_CONTEXT", "the graph's context is not valid"),
    entry(6040, "GRAPH_CYCLE_DETECTED", "the nodes form a cycle"),
    entry(7000, "TENSOR_INVALID_HANDLE", "the tensor does not exist"),
    entry(7001, "TENSOR_DOES_NOT_EXIST", "the tensor does not exist"),
    entry(7002, "TENSOR_ALREADY_EXISTS", "a tensor of that name exists already"),
    entry(7003, "TENSOR_NAME_HASH_COLLISION", "two tensor names collide; rename one"),
    entry(7004, "TENSOR_INVALID_PARAM", "a field of the tensor is not valid"),
    entry(7005, "TENSOR_UNSUPPORTED_PARAM", "a field of the tensor is not supported here"),
    entry(7006, "TENSOR_INCOMPATIBLE_UPDATE", "the tensor cannot be updated like this"),
    entry(7007, "TENSOR_INVALID_QUANTIZATION", "the tensor's encoding is not accepted"),
    entry(8000, "MEM_INVALID_ARGUMENT", "a memory description is not valid"),
    entry(8001, "MEM_INVALID_HANDLE", "the memory is not registered"),
    entry(8002, "MEM_ALREADY_REGISTERED", "the memory is registered already"),
    fixed(8003, "MEM_MAPPING", "memory could not be mapped to the DSP", SKEL),
    entry(8004, "MEM_INVALID_SHAPE", "the shape of registered memory does not fit"),
    entry(8005, "MEM_UNSUPPORTED_TYPE", "this kind of memory is not supported here"),
    entry(9000, "SIGNAL_INVALID_HANDLE", "the signal does not exist"),
    entry(9001, "SIGNAL_IN_USE", "the signal is in use"),
    entry(9002, "SIGNAL_INVALID_ARGUMENT", "an argument for the signal is not valid"),
    entry(9003, "SIGNAL_INVALID_CONFIG", "the signal's configuration is not valid"),
    entry(9004, "SIGNAL_UNSUPPORTED", "signals are not supported here"),
    entry(9005, "SIGNAL_NOT_TRIGGERED", "the signal was not triggered"),
    entry(10001, "ERROR_INVALID_CODE", "the library has no text for a code"),
    entry(11000, "LOG_INVALID_ARGUMENT", "an argument for the log is not valid"),
    entry(11001, "LOG_INVALID_HANDLE", "the log is closed already"),
    entry(12000, "PROFILE_INVALID_ARGUMENT", "an argument for the profile is not valid"),
    entry(12001, "PROFILE_INVALID_HANDLE", "the profile is closed already"),
    entry(12002, "PROFILE_IN_USE", "the profile is in use"),
    entry(13001, "POWER_INVALID_CONFIG", "a power setting or its id is not valid"),
    entry(13002, "POWER_UNKNOWN_OPTION", "a power option is not known to the library"),
    entry(13004, "POWER_UNSUPPORTED", "a power option is not supported on this device"),
    entry(14000, "DEVICE_INVALID_HANDLE", "the device is closed already"),
    fixed(
        14001,
        "DEVICE_INVALID_CONFIG",
        "the device configuration is not accepted",
        "the target's architecture or chip may be unknown to this library version",
    ),
    fixed(
        14002,
        "DEVICE_HARDWARE_UNAVAILABLE",
        "no NPU answers",
        "this chip may have none, or the process may not access it",
    ),
    entry(14003, "DEVICE_ASSOCIATED_TO_CONTEXT", "a context still uses the device"),
    fixed(
        14004,
        "DEVICE_ACCESS_DENIED",
        "access to the NPU is denied",
        "the process may lack the permission for the DSP device node",
    ),
    entry(15000, "GLOBAL_CONFIG", "a global option is not accepted, or came too late"),
    entry(30000, "SYSTEM_UNSUPPORTED", "the system library does not support this"),
    entry(30001, "SYSTEM_INVALID_ARGUMENT", "not a context binary, or an argument is not valid"),
    entry(30002, "SYSTEM_INVALID_HANDLE", "the system context is closed already"),
    fixed(30010, "MALFORMED_BINARY", "the binary is truncated or malformed", DAMAGED),
    entry(60000, "INTERFACE_NOT_SUPPORTED", "the library lacks this interface"),
];

impl Code {
    /// Success.
    pub const OK: Self = Self(0);

    /// The code of a status.
    pub const fn of(status: u64) -> Self {
        Self((status & 0xffff) as u16)
    }

    fn entry(self) -> Option<&'static Entry> {
        ENTRIES.binary_search_by_key(&self.0, |e| e.code).ok().and_then(|i| ENTRIES.get(i))
    }

    /// qhx's name of the code, or that of its range.
    pub fn name(self) -> &'static str {
        self.entry().map_or_else(|| self.range(), |e| e.name)
    }

    /// Meaning of the code, in words.
    pub fn meaning(self) -> Option<&'static str> {
        self.entry().map(|e| e.meaning)
    }

    /// A likely fix, when there is one.
    pub fn fix(self) -> Option<&'static str> {
        self.entry().and_then(|e| e.fix)
    }

    fn range(self) -> &'static str {
        match self.0 {
            0 => "OK",
            1..2000 => "COMMON",
            2000..3000 => "PROPERTY",
            3000..4000 => "OP_PACKAGE",
            4000..5000 => "BACKEND",
            5000..6000 => "CONTEXT",
            6000..7000 => "GRAPH",
            7000..8000 => "TENSOR",
            8000..9000 => "MEMORY",
            9000..10000 => "SIGNAL",
            10000..11000 => "ERROR",
            11000..12000 => "LOG",
            12000..13000 => "PROFILE",
            13000..14000 => "POWER",
            14000..15000 => "DEVICE",
            15000..16000 => "GLOBAL_CONFIG",
            30000..31000 => "SYSTEM",
            60000..61000 => "INTERFACE",
            _ => "UNKNOWN",
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QNN {} ({})", self.name(), self.0)?;
        if let Some(meaning) = self.meaning() {
            write!(f, ": {meaning}")?;
        }
        Ok(())
    }
}

/// The error of a call that returned `status`: what was attempted, the code explained, and
/// the code's fix, or else where to look, as the hint.
pub fn error(kind: ErrorKind, attempt: impl fmt::Display, status: u64) -> Error {
    let code = Code::of(status);
    let kind = if means_restart(code.0.into()) { ErrorKind::DeviceLost } else { kind };
    let error = Error::new(kind, format!("{attempt}: {code}")).with_code(u64::from(code.0));
    error.hint(code.fix().unwrap_or(LOOK))
}

/// Checks the status that a call returned: any but 0 is an [`error`].
pub(crate) fn check(kind: ErrorKind, attempt: impl fmt::Display, status: u64) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(error(kind, attempt, status)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_sorted_and_unique() {
        assert!(ENTRIES.is_sorted_by(|a, b| a.code < b.code));
        assert!(ENTRIES.len() > 90, "{}", ENTRIES.len());
    }

    #[test]
    fn the_code_is_the_low_16_bits() {
        let error = error(ErrorKind::Context, "loading a.bin", 0xdead_0000_138d);
        assert_eq!(error.code(), Some(5005));
        assert!(
            error.message().starts_with("loading a.bin: QNN CONTEXT_CREATE_FROM_BINARY (5005)")
        );
        assert!(error.hint_text().is_some_and(|h| h.contains("architecture")));
    }

    #[test]
    fn an_unknown_code_still_names_its_range() {
        assert_eq!(Code(5999).to_string(), "QNN CONTEXT (5999)");
        assert_eq!(Code(29999).to_string(), "QNN UNKNOWN (29999)");
    }
}
