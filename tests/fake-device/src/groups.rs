//! Contexts that share one buffer for what does not fit the tightly coupled memory. The emulator refuses the option,
//! so it is taken out of the list before the real library sees it.

#![expect(unsafe_code, reason = "reads the lists of callers")]

use qhx_qnn_sys::{self as sys, Config, ConfigList, Handle, HtpContextConfig};

/// Buffer that a caller asks for: the context that has it, 0 for itself, and its bytes.
pub(crate) type Group = (usize, u64);

/// A list of options without the group, and the group.
///
/// # Safety
/// The list is NULL or ends with NULL, and its entries are options of a context.
pub(crate) unsafe fn split(list: ConfigList) -> (Vec<*const Config>, Option<Group>) {
    let (mut rest, mut group) = (Vec::new(), None);
    if list.is_null() {
        return (rest, group);
    }
    for index in 0.. {
        // SAFETY: the caller vouches that the list ends with NULL, and this is not behind it.
        let entry = unsafe { *list.add(index) };
        if entry.is_null() {
            break;
        }
        // SAFETY: the caller vouches for the entries; custom ones lead to options of HTP.
        let option = unsafe {
            ((*entry).option == sys::CONFIG_CUSTOM)
                .then(|| *(*entry).value.pointer.cast::<HtpContextConfig>())
        };
        match option {
            Some(HtpContextConfig { option: sys::HTP_CONTEXT_GROUP, value: [first, bytes] }) => {
                let first: Handle = std::ptr::with_exposed_provenance_mut(first as usize);
                group = Some((first.addr(), bytes));
            }
            _ => rest.push(entry),
        }
    }
    rest.push(std::ptr::null());
    (rest, group)
}
