// gdelta from Go through cgo, which reads the header. Arrays that C structs point to are pinned or, as here, C's own.
package main

/*
#cgo pkg-config: gdelta
#include <gdelta/reference.h>
#include <stdlib.h>
*/
import "C"

import (
	"fmt"
	"unsafe"
)

func check(status C.gdelta_status) {
	if status != C.GDELTA_OK {
		panic(C.GoString(C.gdelta_last_error()))
	}
}

func ones(count int) unsafe.Pointer {
	data := C.calloc(C.size_t(count), 4)
	for i := range unsafe.Slice((*float32)(data), count) {
		unsafe.Slice((*float32)(data), count)[i] = 1
	}
	return data
}

func main() {
	problem := C.gdelta_problem{batch: 1, tokens: 1000, heads_q: 2, heads_k: 2, heads_v: 4, dim_k: 64, dim_v: 64,
		dtype: C.GDELTA_DTYPE_FP32, l2norm: C.GDELTA_L2NORM_ADD_EPS}
	problem.struct_size = C.uint32_t(unsafe.Sizeof(problem))
	args := (*C.gdelta_forward_args)(C.calloc(1, C.size_t(unsafe.Sizeof(C.gdelta_forward_args{}))))
	args.struct_size = C.uint32_t(unsafe.Sizeof(*args))
	args.q.data, args.k.data = ones(1000*2*64), ones(1000*2*64)
	args.v.data, args.o.data = ones(1000*4*64), ones(1000*4*64)
	check(C.gdelta_reference_forward(&problem, args)) // on the CPU
	fmt.Printf("o[0] = %g\n", *(*float32)(args.o.data))

	var plan *C.gdelta_plan // on the GPU: the same args with device pointers
	var bytes C.size_t
	check(C.gdelta_plan_create(&problem, &plan))
	check(C.gdelta_plan_workspace_size(plan, C.GDELTA_OPERATION_FORWARD, &bytes))
	fmt.Printf("cudaMalloc %d bytes, then gdelta_forward(plan, args, workspace, bytes, stream)\n", bytes)
	C.gdelta_plan_destroy(plan)
}
