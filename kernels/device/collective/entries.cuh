// The kernels of a stand-alone collective, by its Params and its Steps<WHOLE>: in one epoch or by rounds, of whole vectors
// or of anything (`_any`). Comes last in a kernel's file.

extern "C" __global__ void __launch_bounds__(512, 1) one_shot(const __grid_constant__ Params p) {
    weft::one_epoch_of<Steps<true>>(p);
}

extern "C" __global__ void __launch_bounds__(512, 1) one_shot_any(const __grid_constant__ Params p) {
    weft::one_epoch_of<Steps<false>>(p);
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) rounds(const __grid_constant__ Params p) {
    weft::rounds_of<Steps<true>, AT_ONCE>(p);
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) rounds_any(const __grid_constant__ Params p) {
    weft::rounds_of<Steps<false>, AT_ONCE>(p);
}
