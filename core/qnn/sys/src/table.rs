//! The function tables, copied slot by slot.
//!
//! A provider's structure ends right after the last function of its version: what lies behind is
//! not memory of the library. A table is therefore read only as far as the version says.

#![expect(unsafe_code, reason = "reads the provider's function table")]

use std::ffi::{c_char, c_void};

use crate::{
    BinaryInfo, Config, EventData, Handle, Infrastructure, MemDescriptor, OpConfig, PlatformInfo,
    Provider, Status, SystemProvider, Tensor, Version,
};

/// NULL-terminated list of configurations.
pub type ConfigList = *const *const Config;
/// `(format, level, timestamp, arguments)`. The argument list is a pointer in both calling
/// conventions that matter: an array that decays on x86-64, a structure passed by reference on
/// AArch64.
pub type LogCallback = unsafe extern "C" fn(*const c_char, u32, u64, *mut c_void);

macro_rules! table {
    ($(#[$meta:meta])* $name:ident { $($slot:literal $field:ident ( $($arg:ty),* $(,)? );)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        pub struct $name {
            $(pub $field: Option<unsafe extern "C" fn($($arg),*) -> Status>,)*
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($name))
            }
        }

        impl $name {
            /// Reads the first `slots` slots at `base`; later ones are absent.
            ///
            /// # Safety
            /// `base` points at a function table of at least `slots` slots.
            unsafe fn read(base: *const *const c_void, slots: usize) -> Self {
                Self {
                    $($field: if $slot < slots {
                        // SAFETY: the slot lies within the table; NULL reads as `None`, anything
                        // else is a function of this signature.
                        unsafe { base.add($slot).cast::<Option<_>>().read() }
                    } else {
                        None
                    },)*
                }
            }

            /// Puts the functions into their slots of a table, as far as it has them; the other
            /// slots stay. For whoever offers such a table.
            pub fn write(&self, slots: &mut [*const c_void]) {
                $(if let Some(slot) = slots.get_mut($slot) {
                    *slot = self.$field.map_or(std::ptr::null(), |f| f as *const c_void);
                })*
            }
        }
    };
}

table! {
    /// Functions of libQnnHtp that qhx calls.
    CoreTable {
        1 backend_create(Handle, ConfigList, *mut Handle);
        4 backend_get_build_id(*mut *const c_char);
        8 backend_free(Handle);
        9 context_create(Handle, Handle, ConfigList, *mut Handle);
        11 context_get_binary_size(Handle, *mut u64);
        12 context_get_binary(Handle, *mut c_void, u64, *mut u64);
        13 context_create_from_binary(
            Handle, Handle, ConfigList, *const c_void, u64, *mut Handle, Handle,
        );
        14 context_free(Handle, Handle);
        15 graph_create(Handle, *const c_char, ConfigList, *mut Handle);
        18 graph_add_node(Handle, OpConfig);
        19 graph_finalize(Handle, Handle, Handle);
        20 graph_retrieve(Handle, *const c_char, *mut Handle);
        21 graph_execute(Handle, *const Tensor, u32, *mut Tensor, u32, Handle, Handle);
        24 tensor_create_graph_tensor(Handle, *mut Tensor);
        25 log_create(LogCallback, u32, *mut Handle);
        27 log_free(Handle);
        28 profile_create(Handle, u32, *mut Handle);
        30 profile_get_events(Handle, *mut *const u64, *mut u32);
        31 profile_get_sub_events(u64, *mut *const u64, *mut u32);
        32 profile_get_event_data(u64, *mut EventData);
        34 profile_free(Handle);
        35 mem_register(Handle, *const MemDescriptor, u32, *mut Handle);
        36 mem_deregister(*const Handle, u32);
        37 device_get_platform_info(Handle, *mut *const PlatformInfo);
        38 device_free_platform_info(Handle, *const PlatformInfo);
        39 device_get_infrastructure(*mut *const Infrastructure);
        40 device_create(Handle, ConfigList, *mut Handle);
        43 device_free(Handle);
        48 error_get_message(u64, *mut *const c_char);
    }
}

table! {
    /// Functions of libQnnSystem that qhx calls. Slots after these changed places once.
    SystemTable {
        0 context_create(*mut Handle);
        2 get_metadata(Handle, *const c_void, u64, *mut *const BinaryInfo);
        3 context_free(Handle);
    }
}

/// The oldest core interface 2.x whose table and structures are known to be as long as they are
/// read here (QAIRT 2.36).
pub const CORE_FLOOR: u32 = 27;

/// The oldest system interface 1.x whose table is known to have the four slots that are read.
pub const SYSTEM_FLOOR: u32 = 1;

/// Number of slots that a core interface 2.`minor` has for certain, from [`CORE_FLOOR`] on.
pub const fn core_slots(minor: u32) -> usize {
    match minor {
        0..CORE_FLOOR => 0,
        CORE_FLOOR => 68,
        28..32 => 69,
        _ => 71,
    }
}

impl CoreTable {
    /// Reads the table behind `provider`.
    ///
    /// # Safety
    /// `provider` came from `QnnInterface_getProviders` and its core version is 2.[`CORE_FLOOR`] or
    /// a later 2.x.
    pub unsafe fn of(provider: *const Provider, core: Version) -> Self {
        // SAFETY: the caller vouches for the provider; the table begins right after its head.
        unsafe { Self::read((&raw const (*provider).table).cast(), core_slots(core.minor)) }
    }
}

impl SystemTable {
    /// Reads the table behind `provider`.
    ///
    /// # Safety
    /// `provider` came from `QnnSystemInterface_getProviders` and its version is
    /// 1.[`SYSTEM_FLOOR`] or a later 1.x.
    pub unsafe fn of(provider: *const SystemProvider) -> Self {
        // SAFETY: the caller vouches for the provider; these versions have these four slots.
        unsafe { Self::read((&raw const (*provider).table).cast(), 4) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_grow_with_the_version_and_never_shrink() {
        let counts: Vec<_> = (0..60).map(core_slots).collect();
        assert!(counts.is_sorted());
        assert_eq!((counts[26], counts[27], counts[28], counts[40]), (0, 68, 69, 71));
    }

    #[test]
    fn a_slot_beyond_the_version_is_not_read() {
        // A table of 22 slots: reading slot 24 would leave the array.
        let slots = [std::ptr::null::<c_void>(); 22];
        // SAFETY: the array has exactly the slots that are asked for.
        let table = unsafe { CoreTable::read(slots.as_ptr(), slots.len()) };
        assert!(table.error_get_message.is_none() && table.graph_execute.is_none());
    }

    #[test]
    fn what_is_written_into_a_table_is_read_from_it() {
        unsafe extern "C" fn free(_: Handle) -> Status {
            7
        }
        let empty = [std::ptr::null::<c_void>(); 48];
        // SAFETY: the array has exactly the slots that are asked for.
        let mut table = unsafe { CoreTable::read(empty.as_ptr(), empty.len()) };
        table.log_free = Some(free);
        let mut slots = empty;
        table.write(&mut slots);
        assert_eq!(slots.iter().position(|slot| !slot.is_null()), Some(27));
        // SAFETY: as above; the one function has the signature of its slot.
        let read = unsafe { CoreTable::read(slots.as_ptr(), slots.len()) };
        // SAFETY: the function is the one above.
        assert_eq!(read.log_free.map(|free| unsafe { free(std::ptr::null_mut()) }), Some(7));
    }
}
