//! A backend in a crate of its own, over `qhx-exec` alone.
//!
//! Every context has one graph, `double`, whose output `y` is 2 · `x`. Its memory is its own: a real backend allocates
//! with the library of its device and hands what it bound to that library, where this one multiplies by itself. The
//! contract that both sides keep stands in [`qhx_exec::backend`]; SAFETY comments cite its clauses by name.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use qhx_exec::backend::{Backend, BackendInfo, Context, ContextSource, Graph};
use qhx_exec::bindings::Bindings;
use qhx_exec::{
    ALIGNMENT, Buffer, DType, Error, ErrorKind, GraphInfo, Memory, Port, Result, TensorInfo,
};

/// Elements of both tensors.
pub const ELEMENTS: usize = 4;

/// Executes graphs that double.
#[derive(Debug, Default)]
pub struct DoubleBackend;

impl Backend for DoubleBackend {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "double".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            details: Vec::new(),
        }
    }

    fn accepts(&self, source: &ContextSource) -> bool {
        source.binary.is_none()
    }

    fn open_context(&self, source: &ContextSource) -> Result<Arc<dyn Context>> {
        if !self.accepts(source) {
            let message = format!("context {:?}: this backend opens no binaries", source.key);
            return Err(Error::new(ErrorKind::Context, message));
        }
        let tensor = |name: &str| TensorInfo::new(name, DType::F32, vec![ELEMENTS]);
        let graph = GraphInfo::new("double", [tensor("x")], [tensor("y")]);
        Ok(Arc::new(DoubleContext([Arc::new(graph)])))
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let block = Block::zeroed(bytes)?;
        let pointer = block.pointer;
        // SAFETY: the block has that many zeroed bytes with the alignment of buffers, and frees them when it is
        // dropped; nobody else has the pointer.
        Ok(unsafe { Buffer::owned_by(Box::new(block), pointer, bytes) })
    }
}

/// Memory of this backend. [`Memory::owner`] finds it again when it is bound.
#[derive(Debug)]
pub struct Block {
    pointer: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the block owns its memory, which it frees and does nothing else with.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    fn zeroed(bytes: usize) -> Result<Self> {
        let fail = || Error::new(ErrorKind::Graph, format!("no memory of {bytes} bytes"));
        let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).map_err(|_| fail())?;
        // SAFETY: the layout has a byte at least.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(fail)?;
        Ok(Self { pointer, layout })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `zeroed` allocated it with this layout, and nobody has freed it.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) };
    }
}

struct DoubleContext([Arc<GraphInfo>; 1]);

impl Context for DoubleContext {
    fn graphs(&self) -> &[Arc<GraphInfo>] {
        &self.0
    }

    fn open_graph(&self, index: usize) -> Result<Box<dyn Graph>> {
        let info = self.0.get(index).ok_or_else(|| {
            Error::new(ErrorKind::Internal, format!("graph {index} of a context with one"))
        })?;
        let bindings = Bindings::new(info)?;
        Ok(Box::new(DoubleGraph { info: Arc::clone(info), bindings, x: [0.0; ELEMENTS] }))
    }
}

struct DoubleGraph {
    info: Arc<GraphInfo>,
    /// *alive*, *sized*: keeps a handle of what is bound, and checks that the tensor fits.
    bindings: Bindings,
    /// A copy of the input, which may be the same bytes as the output.
    x: [f32; ELEMENTS],
}

impl Graph for DoubleGraph {
    fn info(&self) -> &Arc<GraphInfo> {
        &self.info
    }

    fn bind(&mut self, port: Port, memory: &Memory, offset: usize) -> Result<()> {
        // Another backend's memory, the heap and mapped files work, too; a device would have to copy them.
        let _in_place = memory.owner::<Block>().is_some();
        self.bindings.bind(port, memory, offset)
    }

    unsafe fn execute(&mut self) -> Result<()> {
        // SAFETY: contract: exclusive: nobody writes what is bound to an input.
        let x = unsafe { self.bindings.input(0) }?;
        for (value, bytes) in self.x.iter_mut().zip(x.chunks_exact(4)) {
            *value = f32::from_le_bytes(bytes.try_into().unwrap_or_default());
        }
        // SAFETY: contract: exclusive: nobody reads or writes what is bound to an output; the view of the input ended.
        let y = unsafe { self.bindings.output(0) }?;
        for (bytes, value) in y.chunks_exact_mut(4).zip(&self.x) {
            bytes.copy_from_slice(&(2.0 * value).to_le_bytes());
        }
        Ok(())
    }
}
