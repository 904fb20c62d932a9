//! The machines that the Python package index has QNN libraries for.

use std::borrow::Cow;

use qhx_base::names;

pub use qhx_hub::index::Wheel;

/// Version of the wheels that `qhx libraries install` fetches; they hold QAIRT 2.51.
pub const VERSION: &str = "2.7.0";

/// Package and version of these wheels, as pip takes them.
pub const REQUIREMENT: &str = "onnxruntime-qnn==2.7.0";

/// A machine. There is none for Android: phones take the libraries of the QAIRT SDK.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// Boards with a Hexagon NPU under Linux
    LinuxAarch64,
    /// Laptops with a Hexagon NPU
    WindowsArm64,
    /// Any x86-64 Linux machine, where the libraries emulate the NPU
    LinuxX86,
}

names! { Machine: LinuxAarch64 = "linux-aarch64", WindowsArm64 = "windows-arm64", LinuxX86 = "linux-x86_64" }

impl Machine {
    /// This machine, where it is one of them.
    pub const fn this() -> Option<Self> {
        if cfg!(all(target_os = "linux", target_env = "gnu", target_arch = "x86_64")) {
            Some(Self::LinuxX86)
        } else if cfg!(all(target_os = "linux", target_env = "gnu", target_arch = "aarch64")) {
            Some(Self::LinuxAarch64)
        } else if cfg!(all(windows, target_arch = "aarch64")) {
            Some(Self::WindowsArm64)
        } else {
            None
        }
    }

    /// One-line description.
    pub const fn what(self) -> &'static str {
        match self {
            Self::LinuxAarch64 => "Boards with a Hexagon NPU under Linux",
            Self::WindowsArm64 => "Laptops with a Hexagon NPU",
            Self::LinuxX86 => "Any x86-64 Linux machine, where the libraries emulate the NPU",
        }
    }

    /// The folder of its libraries below the folder of all. The first machine that there were libraries for has the
    /// version alone.
    pub fn folder(self) -> String {
        match self {
            Self::LinuxX86 => VERSION.to_owned(),
            other => format!("{VERSION}-{}", other.name()),
        }
    }

    /// File names of libQnnHtp and libQnnSystem.
    pub const fn libraries(self) -> [&'static str; 2] {
        match self {
            Self::WindowsArm64 => ["QnnHtp.dll", "QnnSystem.dll"],
            Self::LinuxAarch64 | Self::LinuxX86 => ["libQnnHtp.so", "libQnnSystem.so"],
        }
    }

    /// Its wheel.
    pub const fn wheel(self) -> Wheel {
        match self {
            Self::LinuxAarch64 => Wheel {
                requirement: Cow::Borrowed(REQUIREMENT),
                platform: Cow::Borrowed("manylinux_2_34_aarch64"),
                file: Cow::Borrowed("onnxruntime_qnn-2.7.0-cp311-cp311-manylinux_2_34_aarch64.whl"),
                sha256: Cow::Borrowed(
                    "ad08bbfebd7c07ffe83995418303215f46cb25a89e12676f47ee20c32002eaad",
                ),
                megabytes: 87,
            },
            Self::WindowsArm64 => Wheel {
                requirement: Cow::Borrowed(REQUIREMENT),
                platform: Cow::Borrowed("win_arm64"),
                file: Cow::Borrowed("onnxruntime_qnn-2.7.0-cp311-cp311-win_arm64.whl"),
                sha256: Cow::Borrowed(
                    "b919227025f1feb0d2c5cc4232951de22f738b80995e9d4f2af79c3b66e3c95d",
                ),
                megabytes: 62,
            },
            Self::LinuxX86 => Wheel {
                requirement: Cow::Borrowed(REQUIREMENT),
                platform: Cow::Borrowed("manylinux_2_35_x86_64"),
                file: Cow::Borrowed("onnxruntime_qnn-2.7.0-cp311-cp311-manylinux_2_35_x86_64.whl"),
                sha256: Cow::Borrowed(
                    "c56c01562b8534fe8980cfea4601408d950c065f8251fb862ce82101c52c9849",
                ),
                megabytes: 99,
            },
        }
    }
}
