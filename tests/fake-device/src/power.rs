//! Clock control: handed on, with each vote noted in words.

#![expect(unsafe_code, reason = "stands in for functions of the QNN library")]

use std::sync::OnceLock;

use qhx_qnn_sys::{self as sys, Infrastructure, PowerConfig, Status};

use crate::state::{Effect, Kind, call, with};

struct Table {
    create: Option<unsafe extern "C" fn(u32, u32, *mut u32) -> Status>,
    destroy: Option<unsafe extern "C" fn(u32) -> Status>,
    set: Option<unsafe extern "C" fn(u32, *const *const PowerConfig) -> Status>,
    ours: Infrastructure,
}

static TABLE: OnceLock<Table> = OnceLock::new();

/// Table to hand out in place of `real`.
///
/// # Safety
/// `real` leads to the real library's table, which stays.
pub(crate) unsafe fn wrap(real: *const Infrastructure) -> *const Infrastructure {
    let table = TABLE.get_or_init(|| {
        // SAFETY: the caller vouches for the table.
        let real = unsafe { &*real };
        Table {
            create: real.create_power_config,
            destroy: real.destroy_power_config,
            set: real.set_power_config,
            ours: Infrastructure {
                kind: real.kind,
                create_power_config: Some(create),
                destroy_power_config: Some(destroy),
                set_power_config: Some(set),
                set_memory_config: real.set_memory_config,
            },
        }
    });
    &raw const table.ours
}

unsafe extern "C" fn create(device: u32, core: u32, id: *mut u32) -> Status {
    let Some(real) = TABLE.get().and_then(|table| table.create) else { return 1000 };
    call("createPowerConfigId", &[], Effect::Makes(Kind::Power, None, 0), || {
        // SAFETY: as the caller of this function vouches. Where it fails, the number is not read.
        unsafe {
            let status = real(device, core, id);
            // Ids begin at 0, which is no handle elsewhere.
            (status, if status == 0 { *id as usize + 1 } else { 0 })
        }
    })
}

unsafe extern "C" fn destroy(id: u32) -> Status {
    let Some(real) = TABLE.get().and_then(|table| table.destroy) else { return 1000 };
    let key = (Kind::Power, id as usize + 1);
    // SAFETY: as the caller of this function vouches.
    call("destroyPowerConfigId", &[key], Effect::Frees(key), || (unsafe { real(id) }, 0))
}

unsafe extern "C" fn set(id: u32, configs: *const *const PowerConfig) -> Status {
    let Some(real) = TABLE.get().and_then(|table| table.set) else { return 1000 };
    // SAFETY: the caller vouches for a list that ends with NULL.
    let vote = unsafe { describe(configs) };
    with(|state| state.report.votes.push(vote));
    let key = (Kind::Power, id as usize + 1);
    // SAFETY: as the caller of this function vouches.
    call("setPowerConfig", &[key], Effect::None, || (unsafe { real(id, configs) }, 0))
}

/// # Safety
/// `configs` leads to pointers to configurations, the last NULL.
unsafe fn describe(mut configs: *const *const PowerConfig) -> String {
    let mut words = Vec::new();
    // SAFETY: the caller vouches for the list; the option says which member is set.
    unsafe {
        while let Some(config) = configs.as_ref().and_then(|config| config.as_ref()) {
            words.push(match config.option {
                sys::POWER_DCVS_V3 => {
                    let v = config.value.dcvs;
                    format!(
                        "dcvs {} mode {:#x} latency {} sleep {} bus {:#x} {:#x} {:#x} core {:#x} {:#x} {:#x}",
                        v.enable, v.mode, v.sleep_latency, v.sleep_disable, v.bus_min, v.bus_target,
                        v.bus_max, v.core_min, v.core_target, v.core_max
                    )
                }
                sys::POWER_RPC_LATENCY => format!("rpc latency {}", config.value.word),
                sys::POWER_RPC_POLLING => format!("rpc polling {}", config.value.word),
                other => format!("option {other}: {}", config.value.word),
            });
            configs = configs.add(1);
        }
    }
    words.join(", ")
}
