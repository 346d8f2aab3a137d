//! gdelta from Rust. The bindings are made from the header by bindgen:
//!
//!     bindgen reference.h -o gdelta.rs --allowlist-function 'gdelta.*' --allowlist-type 'gdelta.*' \
//!         --allowlist-var 'GDELTA.*' -- -I /opt/gdelta/include
#[allow(non_upper_case_globals, non_camel_case_types, dead_code)]
mod gdelta {
    include!(env!("GDELTA_BINDINGS"));
}
use gdelta::*;
use std::{ffi::CStr, mem::size_of, ptr::null_mut};

fn check(status: gdelta_status) {
    if status != 0 {
        panic!("{}", unsafe { CStr::from_ptr(gdelta_last_error()) }.to_string_lossy());
    }
}

fn main() {
    let (mut q, mut k, mut v) = (vec![1f32; 1000 * 2 * 64], vec![1f32; 1000 * 2 * 64], vec![1f32; 1000 * 4 * 64]);
    let mut o = vec![0f32; v.len()];
    let (mut problem, mut args): (gdelta_problem, gdelta_forward_args) = unsafe { std::mem::zeroed() };
    problem.struct_size = size_of::<gdelta_problem>() as u32;
    (problem.batch, problem.tokens) = (1, 1000);
    (problem.heads_q, problem.heads_k, problem.heads_v) = (2, 2, 4);
    (problem.dim_k, problem.dim_v) = (64, 64);
    problem.dtype = GDELTA_DTYPE_FP32 as i32;
    problem.l2norm = GDELTA_L2NORM_ADD_EPS as i32;
    args.struct_size = size_of::<gdelta_forward_args>() as u32;
    args.q.data = q.as_mut_ptr().cast();
    args.k.data = k.as_mut_ptr().cast();
    args.v.data = v.as_mut_ptr().cast();
    args.o.data = o.as_mut_ptr().cast();
    check(unsafe { gdelta_reference_forward(&problem, &args) }); // on the CPU
    println!("o[0] = {}", o[0]);

    let (mut plan, mut bytes) = (null_mut(), 0); // on the GPU: the same args with device pointers
    check(unsafe { gdelta_plan_create(&problem, &mut plan) });
    check(unsafe { gdelta_plan_workspace_size(plan, GDELTA_OPERATION_FORWARD as i32, &mut bytes) });
    println!("cudaMalloc {bytes} bytes, then gdelta_forward(plan, &args, workspace, bytes, stream)");
    unsafe { gdelta_plan_destroy(plan) };
}
