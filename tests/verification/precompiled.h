// What fibers.cpp and matmuls.cpp begin with: parsed once for all programs (fibers.py).

#include "boxes.h"

#include <functional>
#include <map>
#include <unordered_map>
#include <utility>
