//! Memory of a stand-in libcdsprpc, and its registration with contexts.

#![expect(unsafe_code, reason = "maps memory, and exports the functions of libcdsprpc")]

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_void};

use qhx_qnn_sys::{self as sys, Handle, MemDescriptor, Status, Tensor};

use crate::state::{State, with};

const INVALID_ARGUMENT: Status = 8000;
const INVALID_HANDLE: Status = 8001;
const ALREADY_REGISTERED: Status = 8002;
const MAPPING: Status = 8003;
const UNSUPPORTED: Status = 8005;

/// The first handle: none that the library hands out.
const FIRST: usize = 0x4d45_0000;

/// Memory that was allocated, and what of it is registered.
#[derive(Debug, Default)]
pub(crate) struct Memories {
    /// By address.
    blocks: HashMap<usize, Block>,
    /// By handle.
    registered: HashMap<usize, Registered>,
    made: usize,
}

#[derive(Debug)]
struct Block {
    fd: c_int,
    size: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Registered {
    context: usize,
    fd: c_int,
    /// Address of the tensor.
    address: usize,
    bytes: usize,
    data_type: u32,
}

impl Memories {
    /// Adds what is there to a report.
    pub(crate) fn describe(&self, alive: &mut BTreeMap<String, usize>) {
        for (name, count) in [("memory", self.registered.len()), ("rpcmem", self.blocks.len())] {
            if count > 0 {
                alive.insert(name.to_owned(), count);
            }
        }
    }

    /// Registrations end with their context.
    pub(crate) fn forget_context(&mut self, context: usize) {
        self.registered.retain(|_, r| r.context != context);
    }
}

impl State {
    /// Registers a tensor's memory with a context.
    fn register(&mut self, context: Handle, wanted: &Wanted) -> Result<usize, Status> {
        let found = self.memories.blocks.iter().find(|(_, block)| block.fd == wanted.fd);
        let Some((&address, block)) = found else {
            self.violation(format!("memRegister: file descriptor {} is no rpcmem", wanted.fd));
            return Err(MAPPING);
        };
        let size = block.size;
        if wanted.size.is_some_and(|said| said != size as u64) {
            self.violation(format!("memRegister: size {:?} of a buffer of {size}", wanted.size));
            return Err(INVALID_ARGUMENT);
        }
        let end = wanted.offset.checked_add(wanted.bytes);
        if end.is_none_or(|end| end > size) {
            let Wanted { bytes, offset, .. } = wanted;
            self.violation(format!(
                "memRegister: {bytes} bytes from {offset} on, buffer of {size}"
            ));
            return Err(INVALID_ARGUMENT);
        }
        let new = Registered {
            context: context.addr(),
            fd: wanted.fd,
            address: address + wanted.offset,
            bytes: wanted.bytes,
            data_type: wanted.data_type,
        };
        if self.memories.registered.values().any(|r| *r == new) {
            return Err(ALREADY_REGISTERED);
        }
        let handle = FIRST + self.memories.made;
        self.memories.made += 1;
        self.memories.registered.insert(handle, new);
        self.report.registered += 1;
        Ok(handle)
    }

    /// Ends a registration.
    fn deregister(&mut self, handle: usize) -> Status {
        if self.memories.registered.remove(&handle).is_some() {
            return 0;
        }
        self.violation(format!("memDeRegister: memory {handle:#x} is not registered"));
        INVALID_HANDLE
    }

    /// A tensor of an execution as the emulator takes it: with the address of its bytes.
    pub(crate) fn resolve(&mut self, context: usize, tensor: &Tensor) -> Result<Tensor, Status> {
        // SAFETY: the caller of graphExecute vouches for its tensors.
        let shape = unsafe { list(tensor.dimensions, tensor.rank) };
        let bytes = bytes_of(shape, tensor.data_type);
        if tensor.mem_type != sys::MEM_HANDLE {
            self.report.bytes.raw += u64::from(tensor.data_size);
            if bytes.is_some_and(|bytes| bytes != tensor.data_size as usize) {
                let (id, size) = (tensor.id, tensor.data_size);
                self.violation(format!("graphExecute: tensor {id}: {size} bytes of {shape:?}"));
            }
            return Ok(*tensor);
        }
        let handle = tensor.data.addr();
        let Some(&memory) = self.memories.registered.get(&handle) else {
            let what = format!("tensor {}: memory {handle:#x} is not registered", tensor.id);
            self.violation(format!("graphExecute: {what}"));
            return Err(INVALID_HANDLE);
        };
        if memory.context != context {
            let what = format!("tensor {}: memory registered with another context", tensor.id);
            self.violation(format!("graphExecute: {what}"));
            return Err(INVALID_HANDLE);
        }
        if bytes != Some(memory.bytes) {
            let what = format!("tensor {}: {bytes:?} bytes, memory of {}", tensor.id, memory.bytes);
            self.violation(format!("graphExecute: {what}"));
            return Err(6004);
        }
        self.report.bytes.registered += memory.bytes as u64;
        Ok(Tensor {
            mem_type: sys::MEM_RAW,
            data: std::ptr::with_exposed_provenance_mut(memory.address),
            data_size: u32::try_from(memory.bytes).map_err(|_| INVALID_ARGUMENT)?,
            ..*tensor
        })
    }
}

/// Memory to register.
struct Wanted {
    fd: c_int,
    /// Bytes of the whole buffer, if declared.
    size: Option<u64>,
    offset: usize,
    bytes: usize,
    data_type: u32,
}

impl Wanted {
    /// # Safety
    /// The descriptor is one of memRegister.
    unsafe fn of(descriptor: &MemDescriptor) -> Result<Self, Status> {
        // SAFETY: the caller vouches for the descriptor.
        let shape = unsafe { list(descriptor.dimensions, descriptor.rank) };
        let data_type = descriptor.data_type;
        let bytes = bytes_of(shape, data_type).ok_or(INVALID_ARGUMENT)?;
        match descriptor.mem_type {
            sys::MEM_ION => {
                // SAFETY: the kind says that this member is set.
                let fd = unsafe { descriptor.value.fd };
                Ok(Self { fd, size: None, offset: 0, bytes, data_type })
            }
            sys::MEM_CUSTOM => {
                // SAFETY: the kind says that this member is set; the caller vouches for what it
                // leads to.
                let custom = unsafe { descriptor.value.custom.as_ref() }.ok_or(INVALID_ARGUMENT)?;
                if custom.kind != sys::HTP_MEM_SHARED_BUFFER {
                    return Err(UNSUPPORTED);
                }
                let offset = usize::try_from(custom.offset).map_err(|_| INVALID_ARGUMENT)?;
                Ok(Self { fd: custom.fd, size: Some(custom.size), offset, bytes, data_type })
            }
            _ => Err(UNSUPPORTED),
        }
    }
}

/// # Safety
/// `values` leads to `count` of them, or is NULL.
unsafe fn list<'a>(values: *const u32, count: u32) -> &'a [u32] {
    if values.is_null() {
        return &[];
    }
    // SAFETY: the caller vouches for it.
    unsafe { std::slice::from_raw_parts(values, count as usize) }
}

/// Bytes of a tensor; `None` for an element type or a number of them that has none.
fn bytes_of(shape: &[u32], data_type: u32) -> Option<usize> {
    let width = match data_type {
        sys::TYPE_INT_8
        | sys::TYPE_UINT_8
        | sys::TYPE_SFIXED_8
        | sys::TYPE_UFIXED_8
        | sys::TYPE_BOOL => 1,
        sys::TYPE_INT_16 | sys::TYPE_UINT_16 | sys::TYPE_SFIXED_16 | sys::TYPE_UFIXED_16 => 2,
        sys::TYPE_FLOAT_16 | sys::TYPE_BFLOAT_16 => 2,
        sys::TYPE_INT_32 | sys::TYPE_UINT_32 | sys::TYPE_SFIXED_32 | sys::TYPE_UFIXED_32 => 4,
        sys::TYPE_FLOAT_32 => 4,
        sys::TYPE_INT_64 | sys::TYPE_UINT_64 | sys::TYPE_FLOAT_64 => 8,
        _ => return None,
    };
    shape.iter().try_fold(width, |bytes: usize, &d| bytes.checked_mul(d as usize))
}

/// memRegister, once the call was let through.
///
/// # Safety
/// The arguments must be valid as the interface requires for the function.
pub(crate) unsafe fn register(
    context: Handle,
    descriptors: *const MemDescriptor,
    count: u32,
    handles: *mut Handle,
) -> Status {
    if descriptors.is_null() || handles.is_null() {
        return INVALID_ARGUMENT;
    }
    with(|state| {
        if !state.registers() {
            return 1000;
        }
        for index in 0..count as usize {
            // SAFETY: the caller vouches for as many descriptors.
            let wanted = unsafe { Wanted::of(&*descriptors.add(index)) };
            match wanted.and_then(|wanted| state.register(context, &wanted)) {
                // SAFETY: the caller vouches for as many places for handles.
                Ok(handle) => unsafe {
                    *handles.add(index) = std::ptr::without_provenance_mut(handle)
                },
                Err(status) => return status,
            }
        }
        0
    })
}

/// memDeRegister, once the call was let through.
///
/// # Safety
/// `handles` leads to `count` of them.
pub(crate) unsafe fn deregister(handles: *const Handle, count: u32) -> Status {
    if handles.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the caller vouches for the list.
    let handles = unsafe { std::slice::from_raw_parts(handles, count as usize) };
    with(|state| handles.iter().fold(0, |worst: Status, h| worst.max(state.deregister(h.addr()))))
}

/// Allocates memory that has a file descriptor.
#[unsafe(no_mangle)]
extern "C" fn rpcmem_alloc2(_heap: c_int, _flags: u32, size: usize) -> *mut c_void {
    let Ok(length) = libc::off_t::try_from(size) else { return std::ptr::null_mut() };
    // SAFETY: the name ends with NUL.
    let fd = unsafe { libc::memfd_create(c"rpcmem".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return std::ptr::null_mut();
    }
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the file descriptor is this function's; a new mapping replaces none.
    let address = unsafe {
        match libc::ftruncate(fd, length) {
            0 => libc::mmap(std::ptr::null_mut(), size, access, libc::MAP_SHARED, fd, 0),
            _ => libc::MAP_FAILED,
        }
    };
    if address == libc::MAP_FAILED {
        // SAFETY: the file descriptor is this function's.
        unsafe { libc::close(fd) };
        return std::ptr::null_mut();
    }
    with(|state| state.memories.blocks.insert(address.expose_provenance(), Block { fd, size }));
    address
}

/// Allocates memory of less than 2 GiB.
#[unsafe(no_mangle)]
extern "C" fn rpcmem_alloc(heap: c_int, flags: u32, size: c_int) -> *mut c_void {
    match usize::try_from(size) {
        Ok(size) => rpcmem_alloc2(heap, flags, size),
        Err(_) => std::ptr::null_mut(),
    }
}

/// The file descriptor of memory, or −1.
#[unsafe(no_mangle)]
extern "C" fn rpcmem_to_fd(address: *mut c_void) -> c_int {
    with(|state| state.memories.blocks.get(&address.addr()).map_or(-1, |block| block.fd))
}

/// Frees memory. NULL is ignored.
#[unsafe(no_mangle)]
extern "C" fn rpcmem_free(address: *mut c_void) {
    if address.is_null() {
        return;
    }
    let block = with(|state| {
        let Some(block) = state.memories.blocks.remove(&address.addr()) else {
            state.violation(format!("rpcmem_free: {address:?} is no memory of it"));
            return None;
        };
        let registered = state.memories.registered.values().filter(|r| r.fd == block.fd).count();
        if registered > 0 {
            state.violation(format!("rpcmem_free: memory that is registered {registered} times"));
        }
        Some(block)
    });
    if let Some(Block { fd, size }) = block {
        // SAFETY: both are of one block, which nobody can find any more.
        unsafe {
            libc::munmap(address, size);
            libc::close(fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test: the state is the process's.
    #[test]
    fn memory_is_registered_for_one_context_and_freed_after_that() {
        let block = rpcmem_alloc2(25, 1, 4096);
        let fd = rpcmem_to_fd(block);
        let context: Handle = std::ptr::without_provenance_mut(7);
        let shape = [1, 16];
        let register = |size, offset| {
            let custom =
                sys::HtpMemDescriptor { kind: sys::HTP_MEM_SHARED_BUFFER, size, fd, offset };
            let descriptor = MemDescriptor {
                rank: 2,
                dimensions: shape.as_ptr(),
                shape_config: std::ptr::null(),
                data_type: sys::TYPE_FLOAT_16,
                mem_type: sys::MEM_CUSTOM,
                value: sys::MemValue { custom: &raw const custom },
            };
            let mut handle = std::ptr::null_mut();
            // SAFETY: descriptor and shape live, and there is room for one handle.
            (unsafe { super::register(context, &raw const descriptor, 1, &raw mut handle) }, handle)
        };
        assert_eq!(register(4096, 4096 - 31).0, INVALID_ARGUMENT, "beyond the end");
        assert_eq!(register(4095, 0).0, INVALID_ARGUMENT, "the size is that of the whole buffer");
        let (status, handle) = register(4096, 64);
        assert_eq!(status, 0);
        assert_eq!(register(4096, 64).0, ALREADY_REGISTERED);

        let tensor = |data, rank| Tensor {
            id: 3,
            data_type: sys::TYPE_FLOAT_16,
            rank,
            dimensions: shape.as_ptr(),
            mem_type: sys::MEM_HANDLE,
            data,
            ..Tensor::V1
        };
        let resolve = |context, data, rank| {
            with(|state| {
                state.resolve(context, &tensor(data, rank)).map(|t| (t.data.addr(), t.data_size))
            })
        };
        assert_eq!(resolve(7, handle, 2), Ok((block.addr() + 64, 32)));
        assert_eq!(resolve(8, handle, 2), Err(INVALID_HANDLE), "another context");
        assert_eq!(resolve(7, handle, 1), Err(6004), "another size");
        with(|state| {
            assert_eq!((state.report.bytes.registered, state.report.violations.len()), (32, 4))
        });

        // SAFETY: one handle.
        assert_eq!(unsafe { deregister(&raw const handle, 1) }, 0);
        assert_eq!(resolve(7, handle, 2), Err(INVALID_HANDLE), "deregistered");
        let (_, again) = register(4096, 64);
        assert_ne!(again, handle);
        rpcmem_free(block);
        let last = with(|state| state.report.violations.last().cloned());
        assert!(last.is_some_and(|last| last.contains("registered 1 times")));
        assert_eq!(rpcmem_to_fd(block), -1);
    }
}
